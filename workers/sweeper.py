"""The sweeper: cares for what crashed workers, lost doorbells and deleted jobs leave behind.

Each round ends jobs that were lost for good, rings again for pools that wait in silence, looks through a slice of the
store for files that nothing owns, removes what has no owner, deletes what has expired and the rows of what was deleted
long ago, and forgets old idempotency keys and the log of old webhooks. Of jobs that keep no words it erases what they
have answered. Once a minute, and in each round while such a job has just ended, it empties SQLite's log, which holds
words that were erased. Any number of sweepers may run; each round can be repeated or missed.
"""

import argparse
import logging
import signal
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from sqlalchemy.exc import OperationalError

from media_server.artifacts.reserve import keep_reserve, with_reserve
from media_server.artifacts.store import ArtifactStore, open_artifacts
from media_server.batches import files
from media_server.batches import store as store_of_batches
from media_server.jobs import idempotency, store, words
from media_server.jobs.claims import sweep
from media_server.jobs.database import Database, is_disk_full, open_database
from media_server.jobs.doorbell import make_celery, ring
from media_server.jobs.retention import delete_expired, forget_days, purge
from media_server.jobs.strays import Strays
from media_server.settings import Settings, load_settings
from media_server.webhooks import log
from workers.logging_setup import setup_logging

logger = logging.getLogger(__name__)

# files that cannot be removed are tried again after this, so that they take no other's place in a round
_RETRY_S = 600.0
# how long erased words may stay in SQLite's log
_LOG_S = 60.0


def main(argv: Sequence[str]) -> int:
    """Ring again, end lost jobs, remove files without an owner."""
    parser = argparse.ArgumentParser(prog="media-server sweeper", description=main.__doc__)
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file of settings")
    settings = load_settings(parser.parse_args(argv).config)
    setup_logging(settings, "sweeper")
    for number in (signal.SIGTERM, signal.SIGINT):
        # a round that is broken off is repeated by the next sweeper
        signal.signal(number, lambda *_: sys.exit(0))
    db = open_database(settings.database, ring=partial(ring, make_celery(settings)))
    artifacts = open_artifacts(settings)
    strays = Strays(db, artifacts, age_s=settings.stray_s, is_shared=settings.artifacts_url is not None)
    emptied_at = 0.0
    while True:
        try:
            for prefix in strays.look():
                logger.warning("nothing owns the files under %s; they are removed", prefix)
            with_reserve(settings, partial(sweep_once, settings, db, artifacts))
            forgotten = words.forget_due(db)
            # a log that is in use is tried again in the next round
            is_due = time.monotonic() - emptied_at >= _LOG_S or words.has_any(db)
            if is_due and (not db.has_log or db.empty_log()):
                emptied_at = time.monotonic()
                words.settle(db, forgotten)
        except Exception as error:
            if isinstance(error, OperationalError) and is_disk_full(error):
                # a trace of each round would fill what room there is for the log
                logger.error("this round failed, the disk is full; the next is in %.0f s", settings.sweep_s)
            else:
                logger.exception("this round failed; the next is in %.0f s", settings.sweep_s)
        time.sleep(settings.sweep_s)


def sweep_once(settings: Settings, db: Database, artifacts: ArtifactStore) -> None:
    """Do one round."""
    keep_reserve(settings)
    report = sweep(db, doorbell_s=settings.doorbell_s)
    for job_id in report.lost:
        logger.warning("job %s: failed as worker_lost, its attempts are used up", job_id)
    for job_id in report.cancelled:
        logger.info("job %s: cancelled, its worker is gone", job_id)
    if report.rung:
        logger.info("rang again for %s", ", ".join(report.rung))
    for job_id in delete_expired(db):
        logger.info("job %s: expired and deleted", job_id)
    collect_garbage(db, artifacts)
    for job_id in purge(db, keep_s=settings.keep_deleted_s):
        logger.debug("job %s: its rows are gone", job_id)
    for file_id in files.delete_expired(db):
        logger.info("file %s: expired and deleted", file_id)
    for batch_id in store_of_batches.delete_expired(db, keep_s=min(files.KEEP_S, settings.retention_s or files.KEEP_S)):
        logger.info("batch %s: its row is gone", batch_id)
    forget_days(db)
    idempotency.forget_expired(db)
    log.forget_settled(db)


def collect_garbage(db: Database, artifacts: ArtifactStore) -> None:
    """Remove the files that no job owns any more; the row goes after the files, so a crash only repeats the work."""
    for prefix in store.due_garbage(db):
        try:
            artifacts.delete_prefix(prefix)
        except Exception:
            # each store has its own errors, and none is a reason to keep the other files
            logger.exception("the files under %s could not be removed; tried again in %.0f s", prefix, _RETRY_S)
            store.put_off_garbage(db, prefix, _RETRY_S)
            continue
        store.forget_garbage(db, prefix)
        logger.debug("removed %s", prefix)
