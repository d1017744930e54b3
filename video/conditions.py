"""What a clip is given besides its text: frames at its start, a frame at its end, encoded by the layout's own rule.

Sources: `WanImageToVideoPipeline` of diffusers 0.42 for the first frame and for channels; video/tiny/model.py for
continuation by several frames and for the last frame of the embedded model.

Invariant: a known latent frame is the encoding's mode, normalised; the caller's frames are never scaled or cut here.
"""

from dataclasses import dataclass

import torch
from einops import rearrange
from PIL import Image
from torch import Tensor

from video.checkpoints import Checkpoint
from video.errors import InvalidClip


@dataclass(frozen=True)
class Given:
    """Frames that a clip must contain, `[n, H, W, 3]` uint8: n = 4k+1 at its start, one at its end."""

    start: Tensor | None = None
    end: Tensor | None = None


@dataclass(frozen=True)
class Condition:
    """What is known of the latents; which fields are set follows from the layout.

    `known` `[1, C, F, H, W]` holds clean latents where `free` `[1, 1, F, 1, 1]` is 0; `channels` `[1, 4+C, F, H, W]`
    is joined to the noise; `image` `[1, 257, D]` goes before the text.
    """

    known: Tensor | None = None
    free: Tensor | None = None
    channels: Tensor | None = None
    image: Tensor | None = None


@torch.inference_mode()
def encode_given(checkpoint: Checkpoint, given: Given, num_frames: int, height: int, width: int) -> Condition:
    """Encode the frames that the clip must contain, by the layout's own rule.

    Raises:
        InvalidClip: the layout does not take them, they are too many, or of another size.
    """
    _check_given(checkpoint, given, num_frames, height, width)
    if checkpoint.layout == "wan-t2v":
        return Condition()
    if checkpoint.layout == "wan-i2v":
        return _encode_as_channels(checkpoint, given, num_frames)
    if given.start is None and given.end is None:
        return Condition()
    known = torch.zeros(checkpoint.latent_shape(num_frames, height, width), device=checkpoint.device)
    free = torch.ones(1, 1, known.shape[2], 1, 1, device=checkpoint.device)
    if given.start is not None:
        latents = encode_frames(checkpoint, given.start)
        known[:, :, : latents.shape[2]] = latents
        free[:, :, : latents.shape[2]] = 0
    if given.end is not None:
        # the clip arrives at the image and rests on it: latent 1 of a clip of five equal frames
        resting = given.end.expand(1 + checkpoint.temporal_factor, -1, -1, -1)
        known[:, :, -1:] = encode_frames(checkpoint, resting)[:, :, 1:]
        free[:, :, -1:] = 0
    return Condition(known=known, free=free)


@torch.inference_mode()
def encode_frames(checkpoint: Checkpoint, frames: Tensor) -> Tensor:
    """Encode frames `[n, H, W, 3]` uint8, n = 4k+1, as normalised latents `[1, C, k+1, H/8, W/8]` fp32."""
    return _normalize(checkpoint, _encode_pixels(checkpoint, _to_pixels(checkpoint, frames)))


def put_known(latents: Tensor, condition: Condition) -> Tensor:
    """Put the known latents in their places among `[1, C, F, H, W]`."""
    if condition.known is None or condition.free is None:
        return latents
    return torch.where(condition.free > 0, latents, condition.known)


def _encode_as_channels(checkpoint: Checkpoint, given: Given, num_frames: int) -> Condition:
    """Encode the known frames among grey ones, with a mask of which are known: `[1, 4+C, F, H, W]`."""
    assert given.start is not None
    start = _to_pixels(checkpoint, given.start)
    pixels = start.new_zeros(1, 3, num_frames, *start.shape[3:])
    is_known = torch.zeros(num_frames, device=checkpoint.device)
    pixels[:, :, : start.shape[2]] = start
    is_known[: start.shape[2]] = 1
    if given.end is not None:
        pixels[:, :, -1:] = _to_pixels(checkpoint, given.end)
        is_known[-1] = 1
    latents = _normalize(checkpoint, _encode_pixels(checkpoint, pixels))
    # the first latent frame stands for one frame, which fills all its places in the mask
    places = torch.cat([is_known[:1].expand(checkpoint.temporal_factor), is_known[1:]])
    mask = rearrange(places, "(f t) -> 1 t f 1 1", t=checkpoint.temporal_factor)
    mask = mask.expand(-1, -1, -1, *latents.shape[3:])
    return Condition(channels=torch.cat([mask, latents], dim=1), image=_encode_image(checkpoint, given))


def _encode_image(checkpoint: Checkpoint, given: Given) -> Tensor | None:
    """Encode the known images for Wan 2.1's cross-attention: `[n, 257, D]`, None for models without."""
    if (
        checkpoint.image_encoder is None
        or checkpoint.image_processor is None
        or checkpoint.transformer.config.image_dim is None
        or given.start is None
    ):
        return None
    images = [given.start[0]] if given.end is None else [given.start[0], given.end[0]]
    pixels = checkpoint.image_processor(
        images=[Image.fromarray(image.numpy()) for image in images], return_tensors="pt"
    )
    states = checkpoint.image_encoder(**pixels.to(checkpoint.device), output_hidden_states=True).hidden_states[-2]
    encoded: Tensor = states.to(checkpoint.dtype)
    return encoded


def _check_given(checkpoint: Checkpoint, given: Given, num_frames: int, height: int, width: int) -> None:
    factor = checkpoint.temporal_factor
    if num_frames % factor != 1:
        raise InvalidClip(f"num_frames: must be {factor}k+1 here, got {num_frames}.")
    if height % checkpoint.size_multiple or width % checkpoint.size_multiple:
        raise InvalidClip(f"size: sides must be multiples of {checkpoint.size_multiple}, got {width}x{height}.")
    if checkpoint.layout == "wan-t2v" and (given.start is not None or given.end is not None):
        raise InvalidClip("first_frame, last_frame: this model makes clips from text alone.")
    if checkpoint.layout == "wan-i2v" and given.start is None:
        raise InvalidClip("first_frame: this model needs one.")
    known = 0
    for name, frames in (("first_frame", given.start), ("last_frame", given.end)):
        if frames is None:
            continue
        if tuple(frames.shape[1:]) != (height, width, 3):
            raise InvalidClip(f"{name}: must be {width}x{height}, got {frames.shape[2]}x{frames.shape[1]}.")
        if frames.shape[0] % factor != 1:
            raise InvalidClip(
                f"overlap_frames: must be {factor}k+1, since known frames fill whole latent frames; "
                f"got {frames.shape[0]}."
            )
        known += (frames.shape[0] - 1) // factor + 1
    if known > (num_frames - 1) // factor:
        raise InvalidClip(f"num_frames: {num_frames} leave nothing to make beside the frames that are given.")


def _to_pixels(checkpoint: Checkpoint, frames: Tensor) -> Tensor:
    """Bring `[n, H, W, 3]` uint8 to `[1, 3, n, H, W]` fp32 in [-1, 1] on the device."""
    pixels = rearrange(frames.to(checkpoint.device), "f h w c -> 1 c f h w").float()
    return pixels / 255.0 * 2.0 - 1.0


def _encode_pixels(checkpoint: Checkpoint, pixels: Tensor) -> Tensor:
    latents: Tensor = checkpoint.vae.encode(pixels.to(checkpoint.vae.dtype)).latent_dist.mode()
    return latents.float()


def _normalize(checkpoint: Checkpoint, latents: Tensor) -> Tensor:
    return (latents - checkpoint.latents_mean) * (1.0 / checkpoint.latents_std)
