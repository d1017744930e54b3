"""Which processes one machine runs, on which devices, with how many threads each."""

import os
import sys
from collections.abc import Sequence

from media_server.errors import ConfigurationError
from media_server.settings import ModelEntry, Settings
from workers.gpus import find_gpus
from workers.processes import ChildSpec
from workers.valkey import valkey_command

VALKEY = "valkey"


def plan_children(settings: Settings, listener_fd: int) -> list[ChildSpec]:
    """Say which processes this machine runs, in the order of their start."""
    gpus = find_gpus() if settings.gpus is None else settings.gpus
    video_threads, engine_threads = share_cores(settings, is_cpu_only=not gpus)
    children = []
    if settings.broker_url is None:
        children.append(ChildSpec(VALKEY, tuple(valkey_command(settings))))
    children.append(_python_child("api", "api", "--fd", str(listener_fd), pass_fds=(listener_fd,)))
    devices = _video_devices(settings, gpus)
    if not gpus and settings.video_threads is None:
        # several on the CPU share what one would have
        video_threads = max(1, video_threads // max(1, len(devices)))
    for index, (device, pool) in enumerate(devices):
        name = f"video-{index}"
        arguments = ("--name", name, "--device", device, "--pool", pool, "--threads", str(video_threads))
        children.append(_python_child(name, "worker", *arguments, threads=video_threads, has_leases=True))
    text_models = [entry for entry in settings.models if entry.kind == "text"]
    if settings.engine_url is None:
        for index, entry in enumerate(text_models):
            name = f"engine-{index}"
            command: tuple[str, ...] = ("engine", "--name", name, "--model", entry.name)
            command = (*command, "--device", _engine_device(settings, gpus), "--threads", str(engine_threads))
            children.append(_python_child(name, *command, threads=engine_threads, is_engine=True))
    for name in ("storyboards", "media", "batches"):
        children.append(_python_child(name, name, has_leases=True))
    children.extend(_python_child(name, name) for name in ("deliveries", "sweeper"))
    return children


def _engine_device(settings: Settings, gpus: Sequence[int]) -> str:
    # a clip has its GPU to itself: beside an engine it would run out of memory that its cost does not know of
    if settings.engine_device is not None:
        return settings.engine_device
    has_video = any(entry.kind == "video" for entry in settings.models)
    return "cpu" if has_video or not gpus else f"cuda:{gpus[0]}"


def _python_child(
    name: str,
    *command: str,
    threads: int = 1,
    pass_fds: tuple[int, ...] = (),
    has_leases: bool = False,
    is_engine: bool = False,
) -> ChildSpec:
    # -P: a folder named like one of our packages in the working directory must not shadow it
    program = (sys.executable, "-P", "-m", "media_server.cli", *command)
    return ChildSpec(name, program, thread_environment(threads), pass_fds, has_leases, is_engine)


def _video_devices(settings: Settings, gpus: Sequence[int]) -> list[tuple[str, str]]:
    """Give (device, pool) for each video worker: one a GPU, or one a model on the CPU; none without a video model.

    A GPU whose pool the settings leave open takes that of a model without one, then that of the first.
    Raises ConfigurationError if a GPU's pool has no model, or a model's pool no GPU: neither would ever be ready.
    """
    entries: list[ModelEntry] = [entry for entry in settings.models if entry.kind == "video"]
    if not entries:
        return []
    pools = [entry.pool_name for entry in entries]
    if not gpus:
        return [("cpu", pool) for pool in pools]
    named = {gpu: settings.gpu_pools[gpu] for gpu in gpus if gpu in settings.gpu_pools}
    for gpu, pool in named.items():
        if pool not in pools:
            raise ConfigurationError(
                f"gpus: GPU {gpu} has the pool {pool!r}, which no video model has; there are: {', '.join(pools)}.",
                param="gpus",
                value=pool,
            )
    without = [pool for pool in pools if pool not in named.values()]
    taken = [(gpu, named[gpu] if gpu in named else without.pop(0) if without else pools[0]) for gpu in gpus]
    if without:
        raise ConfigurationError(
            f"models: no GPU is left for the pool {without[0]!r}; this machine has {len(gpus)} for {len(pools)} video "
            "models, and a video worker owns one.",
            param="models",
            value=without[0],
        )
    return [(f"cuda:{gpu}", pool) for gpu, pool in taken]


def share_cores(settings: Settings, *, is_cpu_only: bool) -> tuple[int, int]:
    """Split this machine's cores between video and text, so that both at once do not run more threads than cores.

    Returns (video threads, engine threads); what the settings name is taken as it is.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    engine = settings.engine_threads or max(1, min(8, cores // 4 if is_cpu_only else cores // 2))
    video = settings.video_threads or max(1, cores - engine if is_cpu_only else cores // 4)
    return video, engine


def thread_environment(threads: int) -> dict[str, str]:
    """Bound the thread pools of the libraries in a child; idle OpenMP threads sleep instead of spinning."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")
    return {**dict.fromkeys(names, str(threads)), "OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}
