"""API keys: shown once, kept as a hash that is bound to its row, found while they are valid."""

import pytest
import sqlalchemy as sa

from media_server.errors import ConfigurationError, Conflict, InvalidRequest, NotFound
from media_server.jobs.database import Database
from media_server.jobs.tables import api_keys
from media_server.keys import (
    change_limits,
    create_key,
    find_key,
    get_key,
    has_keys,
    has_valid_keys,
    list_keys,
    revoke_key,
)
from media_server.limits import Budget, KeyLimits, parse_amount, parse_budget
from media_server.open_address import refuse_open_address
from media_server.settings import Settings


def test_a_key_opens_until_it_is_revoked(db: Database) -> None:
    assert not has_keys(db)
    limits = KeyLimits(queued_jobs=3, budgets=(parse_budget("spot:gpu_seconds=60/month"),))
    key, text = create_key(db, "studio", scopes=["read", "submit"], limits=limits)
    other, other_text = create_key(db, "other", scopes=["admin"])
    assert text != other_text and text.startswith(f"{key.prefix}_") and len(text) == 58
    found = find_key(db, text)
    assert found is not None
    assert (found.id, found.name, found.scopes, found.limits) == (
        key.id,
        "studio",
        frozenset({"read", "submit"}),
        limits,
    )
    # as long as the true one, and true but for its end
    assert find_key(db, f"{text[:-1]}{'A' if text[-1] != 'A' else 'B'}") is None
    assert find_key(db, f"{key.prefix}{other_text[len(key.prefix) :]}") is None
    for nonsense in ("", "unused", key.prefix, f"{text} ", f"{text}\n", "msk_" + "é" * 54):
        assert find_key(db, nonsense) is None
    revoked = revoke_key(db, "studio")
    assert revoked.revoked_at is not None
    assert find_key(db, text) is None and find_key(db, other_text) is not None
    with pytest.raises(NotFound):
        revoke_key(db, "studio")
    assert [(item.name, item.revoked_at is None) for item in list_keys(db)] == [("studio", False), ("other", True)]
    assert has_keys(db) and has_valid_keys(db)
    revoke_key(db, other.prefix)
    # it was made once: the service does not fall open again
    assert has_keys(db) and not has_valid_keys(db)


def test_the_database_does_not_hold_the_key(db: Database) -> None:
    _, text = create_key(db, "studio")
    with db.read() as tx:
        row = tx.conn.execute(sa.select(api_keys)).mappings().one()
    secret = text.split("_", 2)[2]
    assert all(secret not in str(value) for value in row.values())
    assert len(row["hash"]) == 64


def test_a_hash_that_is_copied_to_another_row_opens_nothing(db: Database) -> None:
    """Who can write a row, but makes no keys, cannot have an admin's row answer to a key of his own."""
    admin, _ = create_key(db, "admin", scopes=["admin"])
    mine, text = create_key(db, "mine", scopes=["read"])
    with db.write() as tx:
        hash = tx.conn.scalar(sa.select(api_keys.c.hash).where(api_keys.c.id == mine.id))
        tx.conn.execute(api_keys.delete().where(api_keys.c.id == mine.id))
        tx.conn.execute(api_keys.update().where(api_keys.c.id == admin.id).values(hash=hash, prefix=mine.prefix))
    assert find_key(db, text) is None


def test_a_key_ends_with_its_time(db: Database) -> None:
    key, text = create_key(db, "guest", lifetime_s=3600)
    assert find_key(db, text) is not None and has_valid_keys(db)
    with db.write() as tx:
        tx.conn.execute(api_keys.update().values(expires_at=tx.now() - 1))
    assert find_key(db, text) is None and not has_valid_keys(db)
    assert get_key(db, key.id).expires_at is not None


def test_its_use_is_written_down_now_and_then(db: Database) -> None:
    key, text = create_key(db, "studio")
    assert get_key(db, key.id).last_used_at is None
    find_key(db, text)
    first = get_key(db, key.id).last_used_at
    assert first is not None
    find_key(db, text)
    assert get_key(db, key.id).last_used_at == first
    with db.write() as tx:
        tx.conn.execute(api_keys.update().values(last_used_at=first - 61))
    find_key(db, text)
    assert (get_key(db, key.id).last_used_at or 0) >= first


def test_names_are_each_key_s_own(db: Database) -> None:
    create_key(db, "studio")
    with pytest.raises(Conflict, match="studio"):
        create_key(db, "studio")
    revoke_key(db, "studio")
    create_key(db, "studio")
    for name in ("", "key_1", "msk_abc", "x" * 101):
        with pytest.raises(InvalidRequest):
            create_key(db, name)


def test_limits_can_be_changed(db: Database) -> None:
    key, text = create_key(db, "studio", limits=KeyLimits(text_streams=1))
    change_limits(db, "studio", KeyLimits(storage_bytes=5))
    found = find_key(db, text)
    assert found is not None and found.limits == KeyLimits(storage_bytes=5)
    assert get_key(db, key.id).limits == found.limits


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        ("gpu_seconds=3600", Budget(kind="gpu_seconds", amount=3600)),
        ("tokens=1e6/month", Budget(kind="tokens", amount=1e6, per="month")),
        ("a: b:tokens=5", Budget(kind="tokens", amount=5, label="a: b")),
    ],
)
def test_budgets_are_written_as_they_are_read(text: str, budget: Budget) -> None:
    assert parse_budget(text) == budget
    assert parse_budget(str(budget)) == budget


def test_what_is_no_limit_is_refused() -> None:
    for text in ("gpu=1", "tokens=-1", "tokens=", "tokens=1/day", ":tokens=1", "tokens=1.2.3", "tokens=1e999"):
        with pytest.raises(InvalidRequest, match="budget"):
            parse_budget(text)
    assert [parse_amount(text, param="x") for text in ("10G", "1.5k", "7", "2e12")] == [1e10, 1500.0, 7.0, 2e12]
    for text in ("-1", "ten", "nan", "inf", "1Q"):
        with pytest.raises(InvalidRequest, match="x"):
            parse_amount(text, param="x")


def test_other_machines_need_a_valid_key(db: Database) -> None:
    for host in ("127.0.0.1", "::1", "localhost", "127.8.8.8"):
        refuse_open_address(Settings(host=host), db)
    open_to_all = [Settings(host=host) for host in ("0.0.0.0", "::", "192.168.1.5", "media.example.org")]
    for settings in open_to_all:
        with pytest.raises(ConfigurationError, match="media-server keys create"):
            refuse_open_address(settings, db)
    key, _ = create_key(db, "studio")
    for settings in open_to_all:
        refuse_open_address(settings, db)
    revoke_key(db, key.id)
    with pytest.raises(ConfigurationError):
        refuse_open_address(open_to_all[0], db)
