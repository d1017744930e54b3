"""What a clip costs in seconds and bytes: coefficients measured on this machine, and progress predicted from them.

Source: the model card's `cost`. One denoise step is linear in tokens here, guidance included; attention's square is
inside the coefficient, which is measured at the model's default shape, where most clips are.
"""

import logging
import math
import os
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from video.checkpoints import Checkpoint
from video.conditions import Condition
from video.extend import fit_frames
from video.loop import Guidance, decode, denoise, encode_text, noise, schedule

logger = logging.getLogger(__name__)

# a shape is measured only if this bound is kept when its time grows with the square of its tokens
MAX_WARM_UP_S = 20.0
# of the seconds spent on a frame's pixels, the share of the autoencoder; the rest goes into the file
DECODE_SHARE = 0.8
_CGROUP_MEMORY = Path("/sys/fs/cgroup/memory.max")


@dataclass(frozen=True)
class Cost:
    """Coefficients; the fields are those of the card."""

    seconds_fixed: float
    seconds_per_step_token: float
    seconds_per_frame_pixel: float
    bytes_fixed: float
    bytes_per_token: float


@dataclass(frozen=True)
class Shape:
    """A clip's shape for measuring: frames are 4k+1."""

    width: int
    height: int
    num_frames: int


def measure_cost(checkpoint: Checkpoint, smallest: Shape, default: Shape, guidance_scale: float) -> Cost:
    """Run short pieces of clips and take their time and memory.

    Two guided steps and two decoded latent frames of each of a few shapes, from the smallest to the default, each of
    about four times the tokens of the one before; the last one that is bound to stay below MAX_WARM_UP_S counts.
    Memory is the line through the first and the last: what even the smallest clip takes is no matter of tokens.
    """
    reset_peak_memory(checkpoint.device)
    started = time.perf_counter()
    encode_text(checkpoint, "a", "")
    seconds_fixed = time.perf_counter() - started
    tokens, step_s, pixel_s = 1, 0.0, 0.0
    peaks: list[tuple[int, int]] = []
    for shape in _ladder(checkpoint, smallest, default):
        next_tokens = checkpoint.num_tokens(shape.num_frames, shape.height, shape.width)
        if 2 * step_s * tokens * (next_tokens / tokens) ** 2 > MAX_WARM_UP_S:
            logger.info("%s is too slow to measure here; a smaller shape stands for it", shape)
            break
        step_s, pixel_s = _measure(checkpoint, shape, guidance_scale)
        tokens = next_tokens
        peaks.append((tokens, peak_memory_bytes(checkpoint.device)))
    return Cost(seconds_fixed, step_s, pixel_s, *fit_memory(peaks))


def fit_memory(peaks: list[tuple[int, int]]) -> tuple[float, float]:
    """Give bytes that are always held, and bytes a token, from (tokens, peak) of a few shapes, rising.

    One shape alone says nothing of a larger one: then a token counts as nothing.
    """
    (first_tokens, first_bytes), (last_tokens, last_bytes) = peaks[0], peaks[-1]
    if last_tokens == first_tokens:
        return float(first_bytes), 0.0
    per_token = max(last_bytes - first_bytes, 0) / (last_tokens - first_tokens)
    return max(first_bytes - per_token * first_tokens, 0.0), per_token


def _ladder(checkpoint: Checkpoint, smallest: Shape, default: Shape) -> list[Shape]:
    """Give shapes from the smallest to the default, evenly spaced in the logarithm of each side."""
    growth = checkpoint.num_tokens(default.num_frames, default.height, default.width) / checkpoint.num_tokens(
        smallest.num_frames, smallest.height, smallest.width
    )
    rungs = max(1, math.ceil(math.log(max(growth, 1.0), 4)))
    multiple, temporal = checkpoint.size_multiple, checkpoint.temporal_factor

    def between(low: int, high: int, part: float) -> float:
        return float(low * (high / low) ** part)

    return [
        Shape(
            width=round(between(smallest.width, default.width, rung / rungs) / multiple) * multiple,
            height=round(between(smallest.height, default.height, rung / rungs) / multiple) * multiple,
            num_frames=fit_frames(round(between(smallest.num_frames, default.num_frames, rung / rungs)), temporal),
        )
        for rung in range(rungs + 1)
    ]


def _measure(checkpoint: Checkpoint, shape: Shape, guidance_scale: float) -> tuple[float, float]:
    """Give seconds a step and token, and seconds a frame and pixel."""
    text = encode_text(checkpoint, "a", "")
    latents = noise(checkpoint, shape.num_frames, shape.height, shape.width, seed=0)
    condition = Condition()
    if checkpoint.layout == "wan-i2v":
        channels = checkpoint.latent_channels + checkpoint.temporal_factor
        condition = Condition(channels=latents.new_zeros(1, channels, *latents.shape[2:]), image=_no_image(checkpoint))
    times: list[float] = []

    def mark(*_: object) -> None:
        times.append(time.perf_counter())

    denoise(checkpoint, latents, schedule(checkpoint, 2), text, condition, Guidance(guidance_scale), mark)
    tokens = checkpoint.num_tokens(shape.num_frames, shape.height, shape.width)
    step_s = (times[-1] - times[-2]) / tokens
    times.clear()
    frames = 0
    for chunk in decode(checkpoint, latents[:, :, :2], mark):
        frames = chunk.shape[0]
    pixel_s = (times[-1] - times[-2]) / (frames * shape.width * shape.height)
    return step_s, pixel_s / DECODE_SHARE


def _no_image(checkpoint: Checkpoint) -> torch.Tensor | None:
    if checkpoint.image_encoder is None:
        return None
    config = checkpoint.image_encoder.config
    tokens = (config.image_size // config.patch_size) ** 2 + 1
    return torch.zeros(1, tokens, config.hidden_size, dtype=checkpoint.dtype, device=checkpoint.device)


class Pace:
    """Turns reports of stages into one progress and one time of arrival, for a chain of segments.

    Weights are the predicted seconds of each piece; the time that is left is scaled by how this run compares with
    the prediction so far.
    """

    def __init__(
        self,
        cost: Cost,
        *,
        segments: list[tuple[int, int]],
        num_steps: int,
        pixels: int,
        num_frames: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Set up for segments of (tokens, frames made), and a file of `num_frames` of `pixels` each."""
        self.clock = clock
        self.started = clock()
        self.num_segments = len(segments)
        self.weights: dict[tuple[int, str], float] = {}
        for index, (tokens, made_frames) in enumerate(segments):
            self.weights[index, "encode_prompt"] = max(cost.seconds_fixed, 1e-3) / len(segments)
            self.weights[index, "denoise"] = num_steps * tokens * cost.seconds_per_step_token
            self.weights[index, "decode"] = made_frames * pixels * cost.seconds_per_frame_pixel * DECODE_SHARE
        writing = num_frames * pixels * cost.seconds_per_frame_pixel * (1 - DECODE_SHARE)
        self.weights[len(segments) - 1, "encode_video"] = max(writing, 1e-3)
        self.total = sum(self.weights.values())
        self.skipped = 0.0

    def skip(self, segment: int) -> None:
        """Count a segment that an earlier attempt has made."""
        for (index, stage), weight in self.weights.items():
            if index == segment and stage != "encode_video":
                self.skipped += weight

    def at(self, segment: int, stage: str, step: int, total_steps: int) -> tuple[float, float]:
        """Give progress in percent and seconds to go."""
        done = 0.0
        for key, weight in self.weights.items():
            if key == (segment, stage):
                done += weight * step / max(total_steps, 1)
                break
            done += weight
        worked = max(done - self.skipped, 0.0)
        elapsed = self.clock() - self.started
        speed = elapsed / worked if worked > 0.05 * self.total else 1.0
        return 100.0 * done / self.total, max((self.total - done) * speed, 0.0)


def peak_memory_bytes(device: torch.device) -> int:
    """Give the most memory held since the last reset: of the GPU's allocator, or of this process on a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    status = Path("/proc/self/status")
    if status.is_file():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    # macOS counts bytes, other systems kilobytes
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def device_memory_bytes(device: torch.device) -> int:
    """Give the memory of a GPU, or what this process may have of the machine's; 0 where that is unknown."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")] if "SC_PHYS_PAGES" in os.sysconf_names else []
    try:
        # a container's share, "max" without a limit
        found.append(int(_CGROUP_MEMORY.read_text()))
    except (OSError, ValueError):
        logger.debug("this process has no memory limit of its own")
    return min(found, default=0)


def reset_peak_memory(device: torch.device) -> None:
    """Begin a new measurement of the peak, where the system lets us."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    try:
        # proc(5): 5 resets the peak resident set size
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        logger.debug("the peak of memory cannot be reset here; it is the process's highest")


def cost_json(cost: Cost) -> dict[str, Any]:
    """Give the card's `cost`."""
    return dict(vars(cost))
