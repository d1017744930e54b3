"""The batch worker: runs the lines of batches, a few of each owner at a time, through the API's own application.

Any number of them may run: a batch is held under a lease, and one whose worker died is taken up by the next. Its lines'
jobs are ordinary jobs of the lowest priority, which other workers do.
"""

import argparse
import asyncio
import contextlib
import logging
import signal
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from media_server.app import begin_stop, create_app
from media_server.batches import running
from media_server.batches.store import BatchRow
from media_server.settings import Settings, load_settings
from workers.batch_run import BatchRun, Host
from workers.leases import worker_id
from workers.logging_setup import setup_logging

logger = logging.getLogger(__name__)

MAX_BATCHES = 64
_POLL_S = 1.0


def main(argv: Sequence[str]) -> int:
    """Run the requests of batches until SIGTERM."""
    parser = argparse.ArgumentParser(prog="media-server batches", description=main.__doc__)
    parser.add_argument("--name", default="batches", help="name of this worker in logs and leases")
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file of settings")
    arguments = parser.parse_args(argv)
    settings = load_settings(arguments.config)
    setup_logging(settings, arguments.name)
    asyncio.run(_serve_until_told(settings, worker_id(arguments.name)))
    return 0


async def _serve_until_told(settings: Settings, worker: str) -> None:
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    await serve(settings, worker, stopping)


async def serve(settings: Settings, worker: str, stopping: asyncio.Event) -> None:
    """Run batches until `stopping` is set; what is not done then is given back."""
    app = create_app(settings)
    runs: dict[str, asyncio.Task[None]] = {}
    async with app.router.lifespan_context(app):
        host = Host(settings, app, worker, stopping)
        logger.info("%s runs batches", worker)
        while not stopping.is_set():
            for batch in await _claim(host, MAX_BATCHES - len(runs)):
                runs[batch.id] = task = asyncio.create_task(BatchRun(host, batch).run())
                task.add_done_callback(partial(_ended, host, runs, batch.id))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stopping.wait(), _POLL_S)
        if runs:
            await asyncio.wait(list(runs.values()))
        begin_stop(app)


async def _claim(host: Host, room: int) -> list[BatchRow]:
    if room <= 0:
        return []
    claim = partial(running.claim, lease_s=host.settings.lease_s, room=room)
    try:
        return await asyncio.to_thread(claim, host.db, host.worker)
    except Exception:
        logger.exception("batches could not be looked for")
        return []


def _ended(host: Host, runs: dict[str, asyncio.Task[None]], batch_id: str, task: asyncio.Task[None]) -> None:
    runs.pop(batch_id, None)
    if not task.cancelled() and (error := task.exception()) is not None:
        # its lease lapses, and it is taken up again where its rows say
        logger.error("batch %s: its worker failed", batch_id, exc_info=error)
