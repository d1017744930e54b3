"""What a clip starts from: images, and the clip that it continues, as frames of exactly its size."""

from collections import deque
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from video import encode
from video.conditions import Given
from video.drift import Look, LookMeter
from video.errors import InvalidClip
from video.request import ClipInputs, ClipRequest


@dataclass(frozen=True)
class Source:
    """The clip that is continued: its last frames, their look, and how many it has."""

    tail: deque[Tensor]
    look: Look | None
    num_frames: int


def read_inputs(request: ClipRequest, inputs: ClipInputs, threads: int) -> tuple[Given, Source]:
    """Read the frames that a clip begins and ends with, and the end of the clip that it continues.

    Raises:
        InvalidClip: a file does not decode, or is not of the clip's size.
    """
    start = None if inputs.first_frame is None else _read_image(inputs.first_frame, "first_frame")
    end = None if inputs.last_frame is None else _read_image(inputs.last_frame, "last_frame")
    overlap = max(1, int((request.extend or {}).get("overlap_frames") or 1))
    tail: deque[Tensor] = deque(maxlen=overlap)
    if inputs.video is None:
        return Given(start, end), Source(tail, None, 0)
    if start is not None:
        raise InvalidClip("first_frame: a clip that is continued has its first frames already.")
    meter, num_frames = LookMeter(), 0
    # its last second stands for its look: that is what the next frames follow
    recent: deque[Tensor] = deque(maxlen=max(overlap, int(request.fps)))
    for frame in encode.read_frames(inputs.video, threads):
        if tuple(frame.shape[1:]) != (request.height, request.width, 3):
            size, got = f"{request.width}x{request.height}", f"{frame.shape[2]}x{frame.shape[1]}"
            raise InvalidClip(f"video: must be {size}, the clip's size, got {got}.")
        recent.append(frame[0])
        num_frames += 1
    if num_frames < overlap:
        raise InvalidClip(f"video: must have at least the {overlap} frames of overlap, got {num_frames}.")
    meter.add(torch.stack(list(recent)))
    tail.extend(recent)
    return Given(None, end), Source(tail, meter.look(), num_frames)


def _read_image(path: Path, name: str) -> Tensor:
    """Read a still image as `[1, H, W, 3]` uint8."""
    try:
        with Image.open(path, formats=("PNG", "JPEG", "WEBP")) as image:
            return torch.from_numpy(np.array(image.convert("RGB")))[None]
    except (OSError, ValueError, SyntaxError) as error:
        raise InvalidClip(f"{name}: is no image that decodes.") from error
