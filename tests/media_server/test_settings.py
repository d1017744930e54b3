"""Settings: precedence, refusals, and that a child's are its parent's."""

import json
import stat
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

import pytest

from media_server.errors import ConfigurationError
from media_server.settings import ModelEntry, Settings, child_environment, load_settings
from media_server.webhooks.signing import new_secret, sign

CONFIG = """
version = 1
port = 9000
log_level = "DEBUG"
data_dir = "store"

[[models]]
name = "wan"
kind = "video"
path = "/models/wan"

[[gpus]]
index = 0
[[gpus]]
index = 2
pool = "fast"
"""


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PORT", "DATA_DIR", "GPUS", "CONFIG", "SETTINGS", "MODELS", "WEBHOOK_SECRET"):
        monkeypatch.delenv(f"MEDIA_SERVER_{name}", raising=False)


def test_defaults_need_nothing() -> None:
    settings = load_settings()
    assert (settings.host, settings.port, settings.gpus) == ("127.0.0.1", 8000, None)
    assert settings.data_dir == Path.home() / ".local/share/media-server"
    assert settings.database == f"sqlite:///{settings.data_dir}/media-server.db"
    assert [(model.name, model.pool_name) for model in settings.models] == [
        ("tiny-wan", "video"),
        ("smollm2-135m-instruct", "text"),
    ]
    assert settings.model_path(settings.models[0]) == settings.assets_dir() / "tiny_wan"
    assert settings.model_path(settings.models[1]) == settings.data_dir / "models" / "smollm2-135m-instruct"


def test_file_then_environment_then_overrides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "server.toml"
    config.write_text(CONFIG)
    settings = load_settings(config)
    assert (settings.port, settings.log_level) == (9000, "DEBUG")
    assert settings.data_dir == tmp_path / "store"
    assert settings.models == (ModelEntry(name="wan", kind="video", path="/models/wan"),)
    assert (settings.gpus, settings.gpu_pools) == ((0, 2), {2: "fast"})
    monkeypatch.setenv("MEDIA_SERVER_CONFIG", str(config))
    monkeypatch.setenv("MEDIA_SERVER_PORT", "9001")
    assert load_settings().port == 9001
    assert load_settings(port=9002, host=None).port == 9002


@pytest.mark.parametrize(("text", "gpus"), [("", ()), ("cpu", ()), ("0,1", (0, 1)), ("auto", None), ("[3]", (3,))])
def test_gpus_by_environment(monkeypatch: pytest.MonkeyPatch, text: str, gpus: tuple[int, ...] | None) -> None:
    monkeypatch.setenv("MEDIA_SERVER_GPUS", text)
    assert load_settings().gpus == gpus


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("port = 1", "version = 1, got None"),
        ("version = 2", "version = 1, got 2"),
        ("version = 1\nprot = 1", "prot"),
        ("version = 1\nport = 70000", "port"),
        ("version = 1\n[[gpus]]\nnumber = 1", "index"),
        (
            "version = 1\n[[models]]\nname = 'a'\nkind = 'video'\n[[models]]\nname = 'a'\nkind = 'text'",
            "name of its own",
        ),
        ("version =", "cannot be read"),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, config: str, message: str) -> None:
    path = tmp_path / "server.toml"
    path.write_text(config)
    with pytest.raises(ConfigurationError, match=message):
        load_settings(path)


@pytest.mark.parametrize(
    "secret",
    ["mine", "whsec_mine", "whsec_", "whsec_" + "A" * 28, "whsec_" + "A" * 88, "A" * 32, "whsec_" + "é" * 32,
     "whsec_" + "A" * 31, "whsec_" + "A" * 31 + "\n"],
)  # fmt: skip
def test_a_webhook_secret_that_signs_nothing_is_refused_at_the_start(
    monkeypatch: pytest.MonkeyPatch, secret: str
) -> None:
    monkeypatch.setenv("MEDIA_SERVER_WEBHOOK_SECRET", secret)
    with pytest.raises(ConfigurationError, match=r"^Setting webhook_secret: .*base64 of 24 to 64") as caught:
        load_settings()
    # neither in the message nor in the error that it comes from
    said = "".join(traceback.format_exception(caught.value))
    assert caught.value.param == "webhook_secret" and f"got {secret!r}" not in said and "input_value" not in said


def test_a_webhook_secret_that_signs_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    # 24 and 64 bytes in base64, and what the service itself makes
    for secret in ("whsec_" + "A" * 32, "whsec_" + "A" * 86 + "==", new_secret()):
        monkeypatch.setenv("MEDIA_SERVER_WEBHOOK_SECRET", secret)
        assert load_settings().webhook_secret == secret
        assert sign(secret, "id", 0, b"").startswith("v1,")


def test_unknown_variables_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEDIA_SERVER_PROT", "1")
    with pytest.raises(ConfigurationError, match="MEDIA_SERVER_PROT"):
        load_settings()
    with pytest.raises(ConfigurationError, match="MEDIA_SERVER_MISSING"):
        monkeypatch.delenv("MEDIA_SERVER_PROT")
        monkeypatch.setenv("MEDIA_SERVER_MISSING_TOO", "1")
        load_settings()


def test_a_childs_settings_are_its_parents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEDIA_SERVER_PORT", "9001")
    config = tmp_path / "server.toml"
    config.write_text(CONFIG)
    settings = load_settings(config, retention_s=3.5, data_dir=tmp_path)
    code = "from media_server.settings import load_settings; print(load_settings().model_dump_json())"
    environment = child_environment(settings)
    assert "MEDIA_SERVER_PORT" not in environment
    said = subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True)
    assert json.loads(said.stdout) == json.loads(settings.model_dump_json())
    monkeypatch.setenv("MEDIA_SERVER_SETTINGS", environment["MEDIA_SERVER_SETTINGS"])
    assert load_settings() == settings
    assert load_settings(port=1).port == 1


def test_the_runtime_folder_is_short_and_ours_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / ("deep" * 30)))
    settings = load_settings(data_dir=tmp_path / "d")
    folder = settings.runtime_dir
    try:
        assert folder.parent == Path("/tmp")
        assert len(bytes(settings.valkey_socket)) < 100
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert settings.broker == f"redis+socket://{folder}/valkey.sock"
        assert settings.redis_url == f"unix://{folder}/valkey.sock"
        assert load_settings(data_dir=tmp_path / "other").data_dir != settings.data_dir
        folder.chmod(0o755)
        with pytest.raises(ConfigurationError, match="mode 0700"):
            _ = settings.runtime_dir
    finally:
        folder.rmdir()


def test_two_video_models_in_one_pool_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    models = [{"name": "a", "kind": "video"}, {"name": "b", "kind": "video"}]
    monkeypatch.setenv("MEDIA_SERVER_MODELS", json.dumps(models))
    with pytest.raises(ConfigurationError, match=r"^Setting models: .*a and b both have 'video'") as caught:
        load_settings()
    assert caught.value.param == "models"
    models[1]["pool"] = "fast"
    monkeypatch.setenv("MEDIA_SERVER_MODELS", json.dumps(models))
    assert [model.pool_name for model in load_settings().models] == ["video", "fast"]
    # engines are found by their model's name
    texts = [{"name": name, "kind": "text"} for name in ("a", "b")]
    monkeypatch.setenv("MEDIA_SERVER_MODELS", json.dumps(texts))
    assert len(load_settings().models) == 2


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ("redis://:p@host/0", "redis://:p@host/0"),
        ("rediss://:p@host/0", "rediss://:p@host/0?ssl_cert_reqs=required"),
        ("rediss://host/0?ssl_ca_certs=/a.pem", "rediss://host/0?ssl_ca_certs=/a.pem&ssl_cert_reqs=required"),
        ("rediss://host/0?ssl_cert_reqs=none", "rediss://host/0?ssl_cert_reqs=none"),
    ],
)
def test_a_certificate_of_the_broker_is_verified_unless_the_url_says_otherwise(given: str, used: str) -> None:
    settings = load_settings(broker_url=given)
    assert settings.broker == used
    assert settings.redis_url == given


def test_services_of_one_user_share_the_locks_of_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    one, other = (Settings(data_dir=tmp_path / name) for name in ("one", "other"))
    assert one.runtime_dir != other.runtime_dir
    assert one.gpu_lock_dir == other.gpu_lock_dir
    assert stat.S_IMODE(one.gpu_lock_dir.stat().st_mode) == 0o700
    one.gpu_lock_dir.chmod(0o777)
    with pytest.raises(ConfigurationError, match="mode 0700"):
        _ = other.gpu_lock_dir
