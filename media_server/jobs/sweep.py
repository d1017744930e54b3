"""The care for what workers left behind: leases of the dead, jobs that nobody may take again, silent doorbells."""

import sqlalchemy as sa

from media_server import films
from media_server.errors import JobError
from media_server.jobs.database import Database
from media_server.jobs.queue import has_attempts, is_lapsed, is_waiting
from media_server.jobs.rows import FILMS_POOL, select
from media_server.jobs.spec import SweepReport
from media_server.jobs.states import Status
from media_server.jobs.tables import batches, jobs


def end_leases(db: Database, worker: str) -> int:
    """End the leases of a worker that was seen to die, so that its jobs and batches go on at once.

    Returns how many there were.
    """
    count = _release_batches(db, worker)
    with db.read() as tx:
        held = tx.conn.execute(
            sa.select(jobs.c.id, jobs.c.root_id).where(
                jobs.c.lease_owner == worker, jobs.c.status == Status.IN_PROGRESS
            )
        ).all()
    for row in held:
        with db.write("end_lease") as tx:
            tx.lock(row.root_id)
            ended = tx.conn.execute(
                jobs.update()
                .where(jobs.c.id == row.id, jobs.c.lease_owner == worker, jobs.c.status == Status.IN_PROGRESS)
                .values(lease_until=tx.now())
                .returning(jobs.c.pool)
            ).first()
            if ended is not None:
                count += 1
                tx.ring(ended.pool)
    return count


def sweep(db: Database, *, doorbell_s: float) -> SweepReport:
    """Care for what workers left: end jobs that nobody may take again, ring for those that somebody should.

    A lapsed job ends as cancelled if that was asked for, as `worker_lost` if its attempts are used up.
    """
    lost: list[str] = []
    cancelled: list[str] = []
    with db.read() as tx:
        lapsed = select(tx, sa.select(jobs).where(is_lapsed(tx.now())))
    for seen in lapsed:
        if seen.cancel_requested_at is None and has_attempts(seen):
            continue
        with db.write("lost") as tx:
            tx.lock(seen.root_id)
            found = select(tx, sa.select(jobs).where(jobs.c.id == seen.id, is_lapsed(tx.now())))
            if not found:
                continue
            (job,) = found
            if job.cancel_requested_at is not None:
                films.end_job(tx, job, Status.CANCELLED, outcome="lost")
                cancelled.append(job.id)
            elif not has_attempts(job):
                error = JobError("worker_lost", f"Its worker was lost {job.max_attempts} times.")
                films.end_job(tx, job, Status.FAILED, error=error, outcome="lost")
                lost.append(job.id)
    return SweepReport(lost=lost, cancelled=cancelled, rung=_ring_again(db, doorbell_s))


def _release_batches(db: Database, worker: str) -> int:
    is_held = sa.and_(batches.c.lease_owner == worker, batches.c.ended_at.is_(None))
    with db.read() as tx:
        if tx.conn.scalar(sa.select(batches.c.id).where(is_held).limit(1)) is None:
            return 0
    with db.write() as tx:
        freed = tx.conn.execute(batches.update().where(is_held).values(lease_owner=None, lease_until=None))
        return freed.rowcount


def _ring_again(db: Database, doorbell_s: float) -> list[str]:
    """Ring for pools that have work to take and whose bell has been silent for `doorbell_s`."""
    with db.read() as tx:
        now = tx.now()
        last = sa.func.max(jobs.c.doorbell_at)
        waiting = sa.or_(is_waiting(now), is_lapsed(now))
        silent = tx.conn.execute(
            sa.select(jobs.c.pool, sa.func.min(jobs.c.id).label("id"))
            .where(waiting, jobs.c.pool != FILMS_POOL)
            .group_by(jobs.c.pool)
            .having(sa.func.coalesce(last, 0.0) <= now - doorbell_s)
        ).all()
    for row in silent:
        with db.write("ring_again") as tx:
            # one row carries the bell of its pool
            tx.conn.execute(jobs.update().where(jobs.c.id == row.id).values(doorbell_at=tx.now()))
            tx.ring(row.pool)
    return [row.pool for row in silent]
