"""The GPU program: owns one device, loads one model once, makes one clip at a time.

`python -m workers.gpu_program --model-dir DIR --device cpu|cuda:N --threads N --lock FILE`, which the video worker
starts. Protocol, version 1, JSON lines:
- in: `run` {job_id, attempt, request, inputs, resume, out_dir, lease_s}, `alive` with each renewal of the job's lease,
  `cancel` {job_id, attempt}, `stop`;
- out: `ready` {card, device}, then for a run `progress`, `preview`, `checkpoint`, `drift`, and one of `done`, `failed`,
  `cancelled`; and every few seconds `memory` {figures}.

Life: wait for the device's lock, load, measure, `ready`; then runs, until `stop` or the end of stdin. At the end of
stdin it leaves at once, also in the middle of a step: a parent that was killed leaves no orphan. A run whose parent has
not said for most of a lease that it still holds it (it is stopped, or cut off from the database) ends at the next step:
when the lease lapses, nobody works at the job. Signals are the parent's business. Only messages go to stdout; whatever
else is printed goes to stderr.
"""

import argparse
import base64
import errno
import fcntl
import gc
import json
import logging
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from media_server.logging_setup import log_context, setup_logging
from media_server.settings import load_settings
from workers.device_memory import device_memory

PROTOCOL_VERSION = 1
EXIT_MODEL_ERROR = 3
EXIT_DEVICE_LOST = 4
EXIT_OUT_OF_MEMORY = 5
_MEMORY_EVERY_S = 3.0
# of a lease: the worker's clock began before the database's, and a step may be on its way
LEASE_SHARE = 0.8

logger = logging.getLogger("workers.gpu_program")


class Channel:
    """Messages in and out; a thread reads, so that a cancel is heard between two steps."""

    def __init__(self, incoming: IO[str], outgoing: IO[str]) -> None:
        self.incoming = incoming
        self.outgoing = outgoing
        # lines of two threads do not mix
        self.lock = threading.Lock()
        self.runs: queue.Queue[dict[str, Any] | None] = queue.Queue()
        # (job_id, attempt) of runs that are to stop, set by the reader
        self.cancelled: set[tuple[str, int]] = set()
        # when the parent last said that it holds its lease
        self.alive_at = time.monotonic()

    def listen(self) -> None:
        """Start reading."""
        threading.Thread(target=self._read, daemon=True, name="read").start()

    def send(self, type: str, **members: Any) -> None:
        """Write one message."""
        line = json.dumps({"v": PROTOCOL_VERSION, "type": type, **members}) + "\n"
        with self.lock:
            self.outgoing.write(line)
            self.outgoing.flush()

    def _read(self) -> None:
        try:
            for line in self.incoming:
                message = json.loads(line)
                if message["type"] == "run":
                    self.alive_at = time.monotonic()
                    self.runs.put(message)
                elif message["type"] == "alive":
                    self.alive_at = time.monotonic()
                elif message["type"] == "cancel":
                    self.cancelled.add((message["job_id"], message["attempt"]))
                elif message["type"] == "stop":
                    self.runs.put(None)
        except ValueError:
            logger.exception("the parent wrote half a message, as one does that is killed meanwhile")
        finally:
            # the parent is gone: nobody waits for the step that is running
            os._exit(0)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns the exit code."""
    parser = argparse.ArgumentParser(prog="gpu_program", description=__doc__)
    parser.add_argument("--model-dir", type=Path, required=True)
    parser.add_argument("--device", default="cpu", help="cpu or cuda:N")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch and of the encoders")
    parser.add_argument("--lock", type=Path, required=True, help="file that is locked while the device is used")
    parser.add_argument("--name", default="video", help="the model's name on its card")
    parser.add_argument("--pool", default="video", help="the pool on its card")
    parser.add_argument("--hash-cache", type=Path, help="file that remembers the hashes of weights")
    arguments = parser.parse_args(argv)
    for ignored in (signal.SIGTERM, signal.SIGINT):
        signal.signal(ignored, signal.SIG_IGN)
    channel = Channel(sys.stdin, _claim_stdout())
    channel.listen()
    setup_logging(load_settings(), arguments.name)
    with hold_lock(arguments.lock):
        return serve(channel, arguments)


def _claim_stdout() -> IO[str]:
    """Keep stdout for messages, and send everything else that is printed to stderr."""
    outgoing = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return outgoing


def hold_lock(path: Path) -> IO[str]:
    """Lock a file, waiting for whoever holds it; the lock ends with the process or when the file is closed."""
    while True:
        file = path.open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("the device is in use; waiting for %s", path.name)
            fcntl.flock(file, fcntl.LOCK_EX)
        if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
            return file
        # a service that has stopped took the file away meanwhile: whoever comes next locks another
        file.close()


def serve(channel: Channel, arguments: argparse.Namespace) -> int:
    """Load the model and make clips until told to stop; the device is not touched before this."""
    import diffusers
    import torch
    import transformers

    from video.card import make_card
    from video.checkpoints import load_checkpoint
    from video.errors import CheckpointError
    from video.preview import fit_previewer

    torch.set_num_threads(arguments.threads)
    for library in (diffusers, transformers):
        library.utils.logging.disable_progress_bar()
    started = time.monotonic()
    try:
        checkpoint = load_checkpoint(arguments.model_dir, arguments.device, arguments.hash_cache)
        card = make_card(checkpoint, arguments.name, arguments.pool)
        previewer = fit_previewer(checkpoint)
    except CheckpointError as error:
        channel.send("failed", code=error.code, message=str(error))
        return EXIT_MODEL_ERROR
    except Exception as error:
        logger.exception("the model does not load")
        channel.send("failed", code=_code_of(error), message=_message_of(error))
        return EXIT_MODEL_ERROR
    logger.info("%s is loaded on %s, %.1f s", arguments.name, arguments.device, time.monotonic() - started)
    channel.send("ready", card=card, device=arguments.device)
    threading.Thread(target=_say_memory, args=(channel, checkpoint.device), daemon=True, name="memory").start()
    while (run := channel.runs.get()) is not None:
        with log_context(job_id=run["job_id"], attempt=run["attempt"]):
            exit_code = do_run(channel, run, checkpoint, card, arguments.threads, previewer)
        if exit_code is not None:
            return exit_code
    return 0


def do_run(
    channel: Channel, run: dict[str, Any], checkpoint: Any, card: dict[str, Any], threads: int, previewer: Any = None
) -> int | None:
    """Make one clip and answer for it; gives an exit code if this process is not to make another.

    After a lack of memory it is not: what is left of it, in pieces, may be too little for a clip that fits.
    """
    from video.clip import Progress, SegmentFile, make_clip
    from video.cost import Cost, peak_memory_bytes, reset_peak_memory
    from video.errors import Cancelled
    from video.preview import Preview
    from video.request import ClipInputs, read_request

    key = (run["job_id"], run["attempt"])
    about = {"job_id": key[0], "attempt": key[1]}
    longest_silence_s = LEASE_SHARE * run["lease_s"]

    def report(progress: Progress) -> None:
        if key in channel.cancelled:
            raise Cancelled("cancelled by the worker")
        if time.monotonic() - channel.alive_at > longest_silence_s:
            logger.warning("job %s attempt %d: the worker has not renewed its lease; the run is ended", *key)
            raise Cancelled("the worker has lost its lease")
        channel.send("progress", **about, **vars(progress), at=time.monotonic())

    def keep_segment(segment: SegmentFile) -> None:
        channel.send("checkpoint", **about, segment=segment.index, path=str(segment.path), data=segment.data)

    def show(preview: Preview) -> None:
        picture = base64.b64encode(preview.jpeg).decode("ascii")
        channel.send("preview", **about, **{**vars(preview), "jpeg": picture})

    def found(finding: dict[str, Any]) -> None:
        channel.send("drift", **about, finding=finding)

    started = time.monotonic()
    reset_peak_memory(checkpoint.device)
    error: BaseException | None = None
    try:
        made = make_clip(
            checkpoint,
            card,
            read_request(run["request"]),
            ClipInputs(**{name: Path(path) for name, path in run["inputs"].items() if path is not None}),
            Path(run["out_dir"]),
            cost=Cost(**card["cost"]),
            threads=threads,
            report=report,
            keep_segment=keep_segment,
            previewer=previewer,
            show=show,
            found=found,
            resume=[SegmentFile(entry["segment"], Path(entry["path"]), entry["data"]) for entry in run["resume"]],
        )
    except Cancelled:
        channel.send("cancelled", **about)
    except Exception as caught:
        error = caught
    else:
        channel.send(
            "done",
            **about,
            artifacts=[
                {"name": file.name, "path": str(file.path), "content_type": file.content_type} for file in made.files
            ],
            manifest=made.manifest,
            gpu_seconds=time.monotonic() - started,
            peak_memory_bytes=peak_memory_bytes(checkpoint.device),
        )
    exit_code = None
    if error is not None:
        code, message = _code_of(error), _message_of(error)
        logger.error("job %s attempt %d: %s: %s", *key, code, message, exc_info=error if code in _LOGGED else None)
        # the frames of the traceback hold the tensors of the run
        error.__traceback__ = None
        exit_code = _LAST_RUN.get(code)
        channel.send("failed", **about, code=code, message=message)
    channel.cancelled.discard(key)
    error = None
    _give_memory_back(checkpoint.device)
    return exit_code


def _say_memory(channel: Channel, device: Any) -> None:
    """Say every few seconds what the device holds, for as long as the program lives."""
    while True:
        channel.send("memory", figures=device_memory(device))
        time.sleep(_MEMORY_EVERY_S)


_LAST_RUN = {"worker_crashed": EXIT_DEVICE_LOST, "out_of_memory": EXIT_OUT_OF_MEMORY}
_LOGGED = ("internal_error", "model_error", "worker_crashed")


def _code_of(error: BaseException) -> str:
    """Map what the video engine and torch raise to a job's error code; the one place where this is done."""
    import torch

    from video.errors import VideoError

    if isinstance(error, VideoError):
        return error.code
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return "out_of_memory"
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return "insufficient_storage"
    text = str(error)
    if isinstance(error, RuntimeError) and ("can't allocate memory" in text or "not enough memory" in text):
        return "out_of_memory"
    if isinstance(error, RuntimeError) and "CUDA error" in text:
        # after such an error every later call on the device fails too
        return "worker_crashed"
    return "internal_error"


def _message_of(error: BaseException) -> str:
    from video.errors import VideoError

    code = _code_of(error)
    if isinstance(error, VideoError):
        return str(error)
    if code == "out_of_memory":
        return "The device has too little memory for this size and length."
    if code == "insufficient_storage":
        return "The disk is full; the clip could not be written."
    if code == "worker_crashed":
        return "The device failed and is started again."
    return f"The video program failed unexpectedly ({type(error).__name__}); its log has the details."


def _give_memory_back(device: Any) -> None:
    """Free what the run held, so that the next one starts clean."""
    gc.collect()
    if device.type == "cuda":
        import torch

        torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(main())
