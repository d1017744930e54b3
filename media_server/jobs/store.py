"""What the API does to jobs: submit, read, cancel, delete; lists and places in queues stand beside it."""

from collections.abc import Sequence

import sqlalchemy as sa

from media_server import films
from media_server.errors import Conflict, NotReady
from media_server.jobs.database import Database, Transaction
from media_server.jobs.lists import MAX_PAGE, list_jobs
from media_server.jobs.place import Place, place_of, places_of
from media_server.jobs.rows import insert, load, select
from media_server.jobs.spec import ArtifactRecord, Job, JobSpec
from media_server.jobs.tables import artifacts, garbage, jobs
from media_server.jobs.transitions import discard, erase

# how long the files of a job that is being accepted may wait for its row
ACCEPT_S = 600.0

__all__ = [
    "MAX_PAGE",
    "artifacts_of",
    "delete",
    "due_garbage",
    "find_place",
    "find_places",
    "forget_garbage",
    "get",
    "hold_files",
    "keep_files",
    "list_jobs",
    "put_off_garbage",
    "request_cancel",
    "submit",
    "submit_in",
]


def submit(db: Database, spec: JobSpec) -> Job:
    """Write a job and its first event, then ring its pool."""
    with db.write("accept") as tx:
        return insert(tx, spec)


def hold_files(db: Database, prefix: str) -> None:
    """Say that files under a prefix are about to be written whose job has no row yet.

    If their writer dies before `keep_files`, they are removed after ACCEPT_S.
    """
    with db.write("hold_files") as tx:
        discard(tx, prefix, delay_s=ACCEPT_S)


def keep_files(tx: Transaction, prefix: str) -> None:
    """Keep the files that were held, in the transaction that writes their job.

    Raises NotReady if that took so long that they were removed.
    """
    if tx.conn.execute(garbage.delete().where(garbage.c.prefix == prefix)).rowcount == 0:
        raise NotReady("Accepting the request took too long; send it again.", code="accepting_took_too_long")


def submit_in(tx: Transaction, spec: JobSpec) -> Job:
    """Do as `submit`, within a transaction."""
    return insert(tx, spec)


def get(db: Database, id: str) -> Job:
    """Read a job. Raises NotFound if there is none, or if it is deleted."""
    with db.read() as tx:
        return load(tx, id)


def request_cancel(db: Database, id: str) -> Job:
    """Cancel a job: at once if it waits, by asking its worker if it runs, with its children if it is a film.

    A job that has ended stays as it is. Raises NotFound.
    """
    with db.write("cancel") as tx:
        films.cancel_job(tx, _locked(tx, id))
        return load(tx, id)


def delete(db: Database, id: str) -> list[str]:
    """Delete a job and, if it is a film, its children; what runs is cancelled, and its files go once it has ended.

    Returns the key prefixes of those that have ended; the sweeper removes them too, so none can be forgotten.
    Raises NotFound, or Conflict for a child whose film still needs it.
    """
    with db.write("delete") as tx:
        job = _locked(tx, id)
        if job.parent_id is not None:
            film = load(tx, job.parent_id, with_deleted=True)
            if film.deleted_at is None and (job.kind != "video" or not film.status.is_terminal):
                raise Conflict(f"{id} is part of {film.id}: delete the film instead.", param="id", value=id)
        films.cancel_job(tx, job)
        prefixes = []
        family = sa.select(jobs).where(sa.or_(jobs.c.id == id, jobs.c.parent_id == id), jobs.c.deleted_at.is_(None))
        for member in select(tx, family):
            tx.conn.execute(jobs.update().where(jobs.c.id == member.id).values(deleted_at=tx.now()))
            if member.status.is_terminal:
                erase(tx, member)
                discard(tx, f"{member.id}/")
                prefixes.append(f"{member.id}/")
        return prefixes


def find_place(db: Database, id: str) -> Place | None:
    """Find a job's place in its queue; None if it does not wait. Raises NotFound."""
    with db.read() as tx:
        return place_of(tx, load(tx, id))


def find_places(db: Database, page: Sequence[Job]) -> dict[str, Place]:
    """Find the places of those jobs of a page that wait."""
    with db.read() as tx:
        return places_of(tx, page)


def artifacts_of(db: Database, id: str) -> list[ArtifactRecord]:
    """List the files of a job's winning attempt; a film's are those of its joining. Raises NotFound."""
    with db.read() as tx:
        job = load(tx, id)
        if job.kind == "film" and job.result and job.result.get("join_job_id"):
            job = load(tx, job.result["join_job_id"])
        rows = tx.conn.execute(
            sa.select(
                artifacts.c.name,
                artifacts.c.key,
                artifacts.c.content_type,
                artifacts.c.size_bytes,
                artifacts.c.sha256,
                artifacts.c.state,
                artifacts.c.sequence,
            )
            .where(artifacts.c.job_id == job.id, artifacts.c.attempt == job.winning_attempt)
            .order_by(artifacts.c.name, artifacts.c.sequence)
        )
        return [ArtifactRecord(**row) for row in rows.mappings()]


def due_garbage(db: Database, limit: int = 100) -> list[str]:
    """List key prefixes whose files the sweeper should remove now."""
    with db.read() as tx:
        query = sa.select(garbage.c.prefix).where(garbage.c.due_at <= tx.now()).order_by(garbage.c.due_at)
        return list(tx.conn.scalars(query.limit(limit)))


def forget_garbage(db: Database, prefix: str) -> None:
    """Note that the files under a prefix are gone."""
    with db.write("forget_files") as tx:
        tx.conn.execute(garbage.delete().where(garbage.c.prefix == prefix))


def put_off_garbage(db: Database, prefix: str, delay_s: float) -> None:
    """Have the files under a prefix removed later: they cannot be now."""
    with db.write() as tx:
        discard(tx, prefix, delay_s=delay_s)


def _locked(tx: Transaction, id: str) -> Job:
    """Read a job under its family's lock."""
    tx.lock(load(tx, id).root_id)
    return load(tx, id)
