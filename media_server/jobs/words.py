"""Zero data retention: jobs whose words do not outlive their answer (`answer_s` on the row; None keeps words).

What goes when:
- with the end of a job, in its transaction: its prompts;
- `answer_s` after the end of a root, by the sweeper: what it answered in words, which nobody could read if it went
  sooner: a storyboard in results, events and files, a film's among them;
- an answer to an Idempotency-Key is never kept, only the hash of the request: sent again, it is answered by the job;
- a film is joined without words: no prompts and no title in its timeline, no captions on its contact sheet;
- requests for text leave nothing but their stream in Valkey, which its reader removes at its end (text/engine.py); one
  that asks for `resume_s` is refused;
- batches are refused: their files are words.
SQLite overwrites what is deleted (secure_delete), and the log is emptied into the file until nothing is left in it;
only then is `words_until` taken off. Kept are the files that were asked for, ids, parameters in numbers, hashes of
prompts in manifests, and what a caller gave to be found again: metadata and label, a webhook's URL.

What no program can take back: freed blocks of a disk, older pages of a file system that copies on write or is
snapshotted, swap, dead rows of PostgreSQL until its vacuum and its archived log, old versions in a bucket that keeps
them, memory that Valkey has freed, and whatever receivers and callers have kept.
"""

from typing import Any

import sqlalchemy as sa

from media_server.jobs import ledger
from media_server.jobs.database import Database, Transaction
from media_server.jobs.rows import select
from media_server.jobs.spec import Job
from media_server.jobs.tables import artifacts, events, jobs, prompts
from media_server.jobs.transitions import discard

_A_ROUND = 50
# where a storyboard's words stand in results and parameters
_STORYBOARD = "storyboard"


def forget_due(db: Database) -> list[str]:
    """Erase what roots whose time is over have answered in words; returns their ids, to be settled.

    Repeated until `settle`: the log may still hold what was erased.
    """
    with db.read() as tx:
        due = sa.select(jobs.c.id).where(jobs.c.words_until <= tx.now()).order_by(jobs.c.words_until)
        roots = list(tx.conn.scalars(due.limit(_A_ROUND)))
    for root_id in roots:
        with db.write() as tx:
            tx.lock(root_id)
            for member in select(tx, sa.select(jobs).where(jobs.c.root_id == root_id)):
                # one that is still to stop comes back with its own end
                if member.status.is_terminal:
                    _erase_answer(tx, member)
    return roots


def settle(db: Database, roots: list[str]) -> None:
    """Note that nothing is left of these, in the log neither."""
    if roots:
        with db.write() as tx:
            is_over = sa.and_(jobs.c.id.in_(roots), jobs.c.words_until <= tx.now())
            tx.conn.execute(jobs.update().where(is_over).values(words_until=None))


def has_any(db: Database) -> bool:
    """Whether a job that keeps no words has ended lately: the log may hold its prompts."""
    with db.read() as tx:
        return tx.conn.execute(sa.select(jobs.c.id).where(jobs.c.words_until.is_not(None)).limit(1)).first() is not None


def _erase_answer(tx: Transaction, job: Job) -> None:
    values: dict[str, Any] = {}
    if job.result and _STORYBOARD in job.result:
        values["result"] = {name: value for name, value in job.result.items() if name != _STORYBOARD}
    if _STORYBOARD in job.params:
        values["params"] = {name: value for name, value in job.params.items() if name != _STORYBOARD}
    if values:
        tx.conn.execute(jobs.update().where(jobs.c.id == job.id).values(**values))
    tx.conn.execute(prompts.delete().where(prompts.c.job_id == job.id))
    if job.kind != "storyboard":
        return
    # its text, as it was written
    tx.conn.execute(
        events.update()
        .where(events.c.job_id == job.id, events.c.type == "job.progress")
        .values(data={"stage": job.kind})
    )
    if tx.conn.execute(artifacts.delete().where(artifacts.c.job_id == job.id)).rowcount:
        ledger.give_up_storage(tx, job)
        discard(tx, f"{job.id}/")
