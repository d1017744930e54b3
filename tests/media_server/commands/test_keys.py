"""`media-server keys` on the database of a data folder, and `media-server usage` over HTTP."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from media_server.client import Client
from media_server.commands import keys, usage
from media_server.errors import ConfigurationError, InvalidRequest, NotFound
from media_server.jobs.database import open_database
from media_server.keys import find_key
from media_server.settings import Settings


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder that no service has used yet."""
    monkeypatch.delenv("MEDIA_SERVER_DATABASE_URL", raising=False)
    return tmp_path / "data"


def _run(command: Any, data: Path, *arguments: str) -> Result:
    return CliRunner().invoke(command, [*arguments, "--data", str(data)], catch_exceptions=False)


def test_a_key_can_be_made_before_the_service_runs(data: Path) -> None:
    made = _run(keys.create, data, "studio", "--queued-jobs", "5", "--storage", "10G", "--budget", "spot:tokens=1e6")
    text = made.stdout.strip()
    assert "is not shown again" in made.stderr and text not in made.stderr
    db = open_database(Settings(data_dir=data).database)
    found = find_key(db, text)
    db.close()
    assert found is not None
    assert found.scopes == {"submit", "read"}
    assert (found.limits.queued_jobs, found.limits.storage_bytes) == (5, 10_000_000_000)
    assert [str(budget) for budget in found.limits.budgets] == ["spot:tokens=1000000"]


def test_keys_are_listed_limited_and_revoked(data: Path) -> None:
    made = json.loads(_run(keys.create, data, "studio", "--scope", "read", "--days", "2", "--json").stdout)
    assert made["key"].startswith(made["prefix"]) and made["scopes"] == ["read"]
    assert made["expires_at"] - made["created_at"] == 2 * 86400
    limited = json.loads(
        _run(keys.limit, data, "studio", "--text-streams", "2", "--work-per-day", "2e12", "--json").stdout
    )
    assert limited["limits"] == {"text_streams": 2, "work_per_day": 2e12}
    assert (
        "queued_jobs=1, text_streams=2, work_per_day=2000000000000"
        in _run(keys.limit, data, "studio", "--queued-jobs", "1").stdout
    )
    assert "tokens=5" in _run(keys.limit, data, made["id"], "--none", "--budget", "tokens=5").stdout
    listed = json.loads(_run(keys.list_, data, "--json").stdout)
    assert [(key["name"], key["limits"], key["revoked_at"]) for key in listed] == [
        ("studio", {"budgets": [{"kind": "tokens", "amount": 5.0}]}, None)
    ]
    assert "key" not in listed[0]
    table = _run(keys.list_, data).stdout
    assert "tokens=5" in table.replace("\n", "") and made["key"] not in table
    assert "is revoked" in _run(keys.revoke, data, made["prefix"]).stdout
    assert json.loads(_run(keys.list_, data, "--json").stdout)[0]["revoked_at"] is not None
    with pytest.raises(NotFound, match="studio"):
        _run(keys.revoke, data, "studio")


def test_a_key_may_keep_no_words(data: Path) -> None:
    made = json.loads(_run(keys.create, data, "studio", "--zero-retention", "--budget", "tokens=5", "--json").stdout)
    assert made["limits"]["zero_retention"] is True
    # other limits leave it as it is
    changed = json.loads(_run(keys.limit, data, "studio", "--queued-jobs", "3", "--json").stdout)
    assert changed["limits"]["zero_retention"] is True and changed["limits"]["queued_jobs"] == 3
    assert "zero retention" in " ".join(_run(keys.list_, data).stdout.split())
    changed = json.loads(_run(keys.limit, data, "studio", "--retention", "--json").stdout)
    assert "zero_retention" not in changed["limits"] and changed["limits"]["queued_jobs"] == 3
    assert "zero_retention" not in json.loads(_run(keys.create, data, "plain", "--json").stdout)["limits"]


def test_amounts_that_are_none_are_refused(data: Path) -> None:
    for arguments in (("--queued-jobs", "1.5"), ("--storage", "big"), ("--budget", "gold=1")):
        with pytest.raises(InvalidRequest):
            _run(keys.create, data, "studio", *arguments)
    assert _run(keys.create, data, "studio", "--scope", "root").exit_code == 2
    assert not data.exists(), "nothing was made"


class _Answers(Client):
    """A service that has one line to report."""

    def __init__(self) -> None:
        super().__init__("http://127.0.0.1:9")
        self.asked: list[tuple[str, dict[str, Any]]] = []

    def get(self, path: str, **params: Any) -> dict[str, Any]:
        self.asked.append((path, params))
        line = {"key_id": "key_1", "key_name": "studio", "shot": None, "gpu_seconds": 1234.5, "storage_bytes": 7}
        return {"data": [line], "has_more": True}

    def get_text(self, path: str, **params: Any) -> str:
        self.asked.append((path, params))
        return "key_id,gpu_seconds\r\nkey_1,1234.5\r\n"


def test_usage_is_shown_and_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = _Answers()
    monkeypatch.setattr("media_server.commands.usage.connect", lambda url: service)
    shown = CliRunner().invoke(usage.usage, ["--by", "key", "--by", "shot", "--since", "2026-11-01", "--label", "spot"])
    path, asked = service.asked[0]
    assert (path, asked["group_by"], asked["since"], asked["label"]) == (
        "/v1/usage", ["key", "shot"], 1793491200.0, "spot",
    )  # fmt: skip
    assert "1,234.5" in shown.output and "studio" in shown.output and "more than 100 lines" in shown.output
    target = tmp_path / "usage.csv"
    CliRunner().invoke(usage.usage, ["--csv", str(target)])
    assert target.read_bytes() == b"key_id,gpu_seconds\r\nkey_1,1234.5\r\n"
    assert service.asked[-1][0] == "/v1/usage/export"
    assert CliRunner().invoke(usage.usage, ["--csv", "-"]).stdout_bytes == target.read_bytes()
    assert json.loads(CliRunner().invoke(usage.usage, ["--json"]).output)[0]["key_id"] == "key_1"


@pytest.mark.parametrize("command", [keys.create, keys.list_, keys.revoke, keys.limit])
def test_a_data_folder_that_cannot_be_used_is_named(tmp_path: Path, data: Path, command: Any) -> None:
    file = tmp_path / "file"
    file.write_text("")
    arguments = [] if command is keys.list_ else ["studio"]
    for bad in (file, Path("/proc/x")):
        with pytest.raises(ConfigurationError, match=f"data: .*{bad}") as caught:
            _run(command, bad, *arguments)
        assert caught.value.param == "data"
    with pytest.raises(ConfigurationError, match="must name a folder"):
        CliRunner().invoke(command, [*arguments, "--data", ""], catch_exceptions=False)


@pytest.mark.parametrize("command", [keys.list_, keys.revoke, keys.limit])
def test_only_a_new_key_makes_the_data_folder(data: Path, command: Any) -> None:
    with pytest.raises(ConfigurationError, match="there is no database"):
        _run(command, data, *([] if command is keys.list_ else ["studio"]))
    assert not data.exists()


def test_a_folder_that_may_not_be_written_to_is_named(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _run(keys.create, data, "studio")
    # as for a user who is not the owner; root may write anywhere
    monkeypatch.setattr("media_server.jobs.database.os.access", lambda *_: False)
    with pytest.raises(ConfigurationError, match=r"data: .* cannot be the data folder: Permission denied"):
        _run(keys.list_, data)
