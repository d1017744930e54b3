"""Files that lie in the store and that nothing owns, found by walking through it.

A worker that was stopped for longer than its lease lasts, and for longer than the files of its attempt are waited for,
may wake, write a file and be killed: then no row names the file, and nobody knows of it.
Invariants: what is handed to the sweeper can never be published, since no row moves back (an attempt that is over does
not come again, an ended job keeps the winner it has); files that are held for a job that has no row yet are left; so
is all in a store of another place that has no row at all, for others may keep files there.
"""

import re
import time
from collections.abc import Iterable, Iterator
from itertools import islice

import sqlalchemy as sa

from media_server.artifacts.store import ArtifactStore
from media_server.ids import prefix_of
from media_server.jobs.database import Database, Transaction
from media_server.jobs.states import TERMINAL
from media_server.jobs.tables import files, garbage, jobs
from media_server.jobs.transitions import SEGMENTS, discard

# files that one round looks at: 100,000 are looked through in some four minutes, a few hundredths of a second at a time
A_ROUND = 2000
_ATTEMPT = re.compile(r"[1-9]\d*")
_OWNERS = ("video", "film", "storyboard", "join", "file")


class Strays:
    """One walk after another through the store, a slice a round; what is missed by one is found by the next."""

    def __init__(self, db: Database, artifacts: ArtifactStore, *, age_s: float, is_shared: bool) -> None:
        """Files are left until they are `age_s` old, and a walk begins that long after the one before.

        `is_shared` says that the store is not this service's alone.
        """
        self.db = db
        self.artifacts = artifacts
        self.age_s = age_s
        self.is_shared = is_shared
        self._walk: Iterator[tuple[str, float]] | None = None
        self._next_at = 0.0

    def look(self) -> list[str]:
        """Look at the next slice; gives the key prefixes that the sweeper is to empty, which it now knows of."""
        if self._walk is None:
            if time.monotonic() < self._next_at:
                return []
            self._walk = self.artifacts.walk()
            self._next_at = time.monotonic() + self.age_s
        walk, self._walk = self._walk, None
        seen = list(islice(walk, A_ROUND))
        # a walk that has failed is not gone on with
        self._walk = walk if len(seen) == A_ROUND else None
        oldest = time.time() - self.age_s
        places = {tuple(key.split("/")[:2]) for key, changed_at in seen if changed_at <= oldest}
        owned = {(place[0], place[1]) for place in places if len(place) == 2 and prefix_of(place[0]) in _OWNERS}
        return discard_strays(self.db, owned, with_unknown=not self.is_shared) if owned else []


def discard_strays(db: Database, places: Iterable[tuple[str, str]], *, with_unknown: bool) -> list[str]:
    """Hand over those of the folders (owner's id, part) that lie in the store and that nothing owns; gives them.

    `with_unknown` adds those whose owner has no row. The folders were seen before: their rows are read after them.
    """
    by_owner: dict[str, set[str]] = {}
    for owner, part in places:
        by_owner.setdefault(owner, set()).add(part)
    with db.read() as tx:
        found = _strays(tx, by_owner, with_unknown=with_unknown)
    if found:
        with db.write() as tx:
            for prefix in found:
                discard(tx, prefix)
    return found


def _strays(tx: Transaction, by_owner: dict[str, set[str]], *, with_unknown: bool) -> list[str]:
    ids = list(by_owner)
    columns = (jobs.c.id, jobs.c.status, jobs.c.attempt, jobs.c.winning_attempt, jobs.c.deleted_at)
    rows = {row.id: row for row in tx.conn.execute(sa.select(*columns).where(jobs.c.id.in_(ids)))}
    with_row = {*rows, *tx.conn.scalars(sa.select(files.c.id).where(files.c.id.in_(ids)))}
    found = []
    for owner, parts in by_owner.items():
        if owner in rows:
            row = rows[owner]
            found += [
                f"{owner}/{part}/"
                for part in sorted(parts)
                if _is_stray(part, row.status, row.attempt, row.winning_attempt, is_deleted=row.deleted_at is not None)
            ]
        elif owner not in with_row and with_unknown:
            found.append(f"{owner}/")
    # those are in hand, and some of them are to wait
    folders = [f"{prefix.split('/')[0]}/" for prefix in found]
    in_hand = set(tx.conn.scalars(sa.select(garbage.c.prefix).where(garbage.c.prefix.in_([*found, *folders]))))
    return [prefix for prefix, folder in zip(found, folders, strict=True) if not {prefix, folder} & in_hand]


def _is_stray(part: str, status: str, attempt: int, winning_attempt: int | None, *, is_deleted: bool) -> bool:
    """Say whether a part of a job's files is nobody's: one of an attempt that is over, or of a job that is deleted."""
    has_ended = status in TERMINAL
    if is_deleted or part == SEGMENTS:
        return has_ended
    if not _ATTEMPT.fullmatch(part):
        # its inputs
        return False
    return int(part) != winning_attempt if has_ended else int(part) < attempt
