"""The end of what was kept: jobs past their time are deleted, and the bare rows of deleted families go for good.

A deleted job's row stays for `keep_s`, so that its messages can be delivered and its end be looked into; its words and
files went at once. Invariant: a family goes whole, its root with its children, and never before all of them have ended
and each of their messages is settled. The ledger stays.
"""

import sqlalchemy as sa

from media_server.errors import NotFound
from media_server.jobs import ledger, store
from media_server.jobs.database import Database
from media_server.jobs.states import ACTIVE
from media_server.jobs.tables import jobs, metadata, outbox, tallies

# so that one round never takes long; the next takes the rest
_A_ROUND = 50


def delete_expired(db: Database) -> list[str]:
    """Delete jobs whose time to be kept is over, with their children; returns their ids."""
    with db.read() as tx:
        query = sa.select(jobs.c.id).where(
            jobs.c.expires_at <= tx.now(), jobs.c.deleted_at.is_(None), jobs.c.parent_id.is_(None)
        )
        expired = list(tx.conn.scalars(query.limit(_A_ROUND)))
    deleted = []
    for job_id in expired:
        try:
            store.delete(db, job_id)
        except NotFound:
            # another sweeper was first
            continue
        deleted.append(job_id)
    return deleted


def purge(db: Database, *, keep_s: float) -> list[str]:
    """Remove the rows of families that were deleted `keep_s` ago or more; returns the ids of their roots."""
    with db.read() as tx:
        query = sa.select(jobs.c.id).where(jobs.c.deleted_at <= tx.now() - keep_s, _is_settled_root())
        roots = list(tx.conn.scalars(query.order_by(jobs.c.deleted_at).limit(_A_ROUND)))
    purged = []
    for root_id in roots:
        with db.write("purge") as tx:
            tx.lock(root_id)
            # a message may have been asked for again meanwhile
            if tx.conn.scalar(sa.select(jobs.c.id).where(jobs.c.id == root_id, _is_settled_root())) is None:
                continue
            family = sa.select(jobs.c.id).where(jobs.c.root_id == root_id)
            for table in reversed(metadata.sorted_tables):
                for column in (key.parent for key in table.foreign_keys if key.column is jobs.c.id):
                    if table is not jobs:
                        tx.conn.execute(table.delete().where(column.in_(family)))
            tx.conn.execute(jobs.delete().where(jobs.c.root_id == root_id))
            purged.append(root_id)
    return purged


def forget_days(db: Database) -> None:
    """Remove the sums of days that no quota is held to any more."""
    with db.read() as tx:
        today = ledger.day_of(tx.now())
        is_over = sa.and_(tallies.c.kind == "work", tallies.c.period < today)
        if tx.conn.execute(sa.select(tallies.c.period).where(is_over).limit(1)).first() is None:
            return
    with db.write() as tx:
        tx.conn.execute(tallies.delete().where(is_over))


def _is_settled_root() -> sa.ColumnElement[bool]:
    """Say of a row whether it is a root whose family is deleted, has ended, and has no message on its way."""
    member = jobs.alias("member")
    is_alive = sa.or_(member.c.deleted_at.is_(None), member.c.status.in_(ACTIVE))
    waits = sa.exists().where(outbox.c.job_id == member.c.id, outbox.c.state == "pending")
    return sa.and_(
        jobs.c.parent_id.is_(None),
        jobs.c.deleted_at.is_not(None),
        ~sa.exists().where(member.c.root_id == jobs.c.id, sa.or_(is_alive, waits)),
    )
