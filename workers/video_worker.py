"""The video worker: claims clips of one pool and has its GPU program make them, one at a time.

It never touches CUDA and imports no torch: the model lives in a subprocess (workers/gpu_program.py) that it starts
again after a death. What it does with a claim stands in workers/video_run.py, clip_order.py and clip_files.py.
"""

import argparse
import fcntl
import logging
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import sqlalchemy.exc

from media_server.errors import ConfigurationError, MediaServerError
from media_server.jobs.spec import Claim
from media_server.models import registry
from media_server.models.card import VideoCard, parse_card
from media_server.settings import ModelEntry, Settings, child_environment, load_settings
from workers.gpu_process import GpuProcess, ProgramDied, ProgramFailed, program_command
from workers.gpus import find_gpus, machine_wide_name
from workers.plan import share_cores
from workers.pool_worker import PoolContext, run_pool_worker
from workers.video_run import ClaimEnded, Run

logger = logging.getLogger(__name__)

SEEN_S = 5.0
# how long a program may take until its model is loaded: the largest, hashed and read from a slow disk, take minutes
LOAD_S = 1800.0


def main(argv: Sequence[str]) -> int:
    """Make the clips of one pool on one device until SIGTERM."""
    parser = argparse.ArgumentParser(prog="media-server worker", description=main.__doc__)
    parser.add_argument("--name", default="video-0", help="name of this worker, unlike any other on this machine")
    parser.add_argument("--device", help="cpu or cuda:N (default: the first GPU, else cpu)")
    parser.add_argument("--pool", default="video", help="pool whose jobs it takes (default video)")
    parser.add_argument("--threads", type=int, help="threads of torch and of the encoders (default: by the settings)")
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file of settings")
    arguments = parser.parse_args(argv)
    settings = load_settings(arguments.config)
    device, threads = _device(settings, arguments.device, arguments.threads)
    entry = find_entry(settings, arguments.pool)
    command = _program(settings, entry, arguments.pool, arguments.name, device, threads)
    worker = VideoWorker(settings, arguments.name, command)
    try:
        return run_pool_worker(
            settings, arguments.pool, arguments.name, 1, worker.handle, on_start=worker.start, on_stop=worker.stop
        )
    except ProgramFailed as error:
        logger.error("%s does not load, %s: %s", entry.name, error.code, error.message)
        return 1


def find_entry(settings: Settings, pool: str) -> ModelEntry:
    """Find the model that serves a pool.

    Raises:
        ConfigurationError: the settings name none for this pool, or several: a worker loads one.
    """
    entries = [entry for entry in settings.models if entry.kind == "video" and entry.pool_name == pool]
    if len(entries) != 1:
        names = ", ".join(entry.name for entry in entries) or "none"
        raise ConfigurationError(
            f"Pool {pool!r} must have exactly one video model in the settings, got {names}.", param="models", value=pool
        )
    return entries[0]


def _device(settings: Settings, device: str | None, threads: int | None) -> tuple[str, int]:
    if device is None:
        gpus = find_gpus() if settings.gpus is None else settings.gpus
        device = f"cuda:{gpus[0]}" if gpus else "cpu"
    return device, threads or share_cores(settings, is_cpu_only=device == "cpu")[0]


def _program(settings: Settings, entry: ModelEntry, pool: str, name: str, device: str, threads: int) -> list[str]:
    # every program of a GPU waits for the same lock; on a CPU a worker's new program waits for its old one
    if device == "cpu":
        lock = settings.runtime_dir / f"cpu-{name}.lock"
    else:
        lock = settings.gpu_lock_dir / f"{machine_wide_name(int(device.removeprefix('cuda:')))}.lock"
    return program_command(
        settings.model_path(entry),
        device,
        threads,
        lock,
        name=entry.name,
        pool=pool,
        hash_cache=settings.data_dir / "weights.json",
    )


class VideoWorker:
    """Owns the GPU program; its hooks and its handler are what `run_pool_worker` takes."""

    def __init__(self, settings: Settings, name: str, command: Sequence[str]) -> None:
        self.settings = settings
        self.command = command
        self.work_dir = settings.data_dir / "work" / name
        self.card: VideoCard | None = None
        self._program: GpuProcess | None = None
        self._name_lock: IO[str] | None = None
        self._lock = threading.Lock()
        self._stopped = threading.Event()

    def start(self, context: PoolContext) -> None:
        """Load the model, publish its card, and say every 5 s that it is there.

        Raises:
            ConfigurationError: another worker of this name runs here.
            ProgramFailed: the model does not load; ProgramLate if not within LOAD_S.
        """
        self._own_name()
        shutil.rmtree(self.work_dir, ignore_errors=True)
        self.work_dir.mkdir(parents=True, mode=0o700)
        self.ensure_program(context)
        threading.Thread(target=self._keep, args=(context,), daemon=True, name="seen").start()

    def stop(self, context: PoolContext) -> None:
        """End the program."""
        self._stopped.set()
        with self._lock:
            if self._program is not None:
                self._program.stop()
                self._program = None
        shutil.rmtree(self.work_dir, ignore_errors=True)
        if self._name_lock is not None:
            self._name_lock.close()

    def _own_name(self) -> None:
        # the folder is emptied at each start: of two workers of one name, one would take the other's clip away
        path = self.work_dir.parent / f"{self.work_dir.name}.lock"
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._name_lock = path.open("a")
        try:
            fcntl.flock(self._name_lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._name_lock.close()
            raise ConfigurationError(
                f"A video worker named {self.work_dir.name!r} runs in this data folder; give this one another --name.",
                param="name",
                value=self.work_dir.name,
            ) from error

    def ensure_program(self, context: PoolContext) -> tuple[GpuProcess, VideoCard]:
        """Give the running program and its model's card, after starting it again if it has died.

        Raises:
            ProgramFailed: the model does not load; ProgramLate if not within LOAD_S.
        """
        with self._lock:
            if self._program is not None and self.card is not None and self._program.is_alive():
                return self._program, self.card
            if self._program is not None:
                logger.warning("the GPU program has died and is started again")
                self._program.kill()
            self._program = None
            try:
                program = GpuProcess(self.command, child_environment(self.settings))
            except OSError as error:
                raise ProgramFailed("worker_crashed", f"it cannot be run: {error}") from error
            try:
                card = parse_card(program.wait_ready(LOAD_S)["card"])
            except ProgramDied as error:
                program.kill()
                raise ProgramFailed("worker_crashed", f"{error} while it loaded the model.") from error
            except (MediaServerError, KeyError, TypeError) as error:
                program.kill()
                raise ProgramFailed("model_error", f"its card cannot be used: {error}") from error
            except BaseException:
                program.kill()
                raise
            assert isinstance(card, VideoCard)
            self._program, self.card = program, card
            registry.publish(context.db, card, context.worker)
            logger.info("%s: GPU program %d serves %s", context.worker, program.pid, card.name)
            return program, card

    def handle(self, context: PoolContext, claim: Claim) -> None:
        """Do one claim to its end."""
        with tempfile.TemporaryDirectory(dir=self.work_dir) as folder:
            run = Run(context, claim, Path(folder), self.ensure_program)
            try:
                run.do()
            except ClaimEnded as end:
                logger.info("job %s attempt %d: %s", claim.job.id, claim.attempt, end)
            except ProgramFailed as error:
                _leave(f"the GPU program cannot be started: {error.message}")
            finally:
                run.close()

    def _keep(self, context: PoolContext) -> None:
        """Refresh the card while the worker lives, and start a program that died while idle."""
        while not self._stopped.wait(SEEN_S):
            try:
                program, _ = self.ensure_program(context)
                registry.seen(context.db, context.worker, program.memory)
            except ProgramFailed as error:
                _leave(f"the GPU program cannot be started: {error.message}")
            except sqlalchemy.exc.DBAPIError:
                logger.warning("the card could not be refreshed; the database does not answer")
            except Exception:
                # a worker that nobody looks after would be listed as gone and take jobs all the same
                logger.exception("the GPU program cannot be looked after")
                _leave("its keeper has failed")
                return


def _leave(reason: str) -> None:
    """End this process in good order; the supervisor starts it again, with back-off."""
    logger.error("%s", reason)
    os.kill(os.getpid(), signal.SIGTERM)
