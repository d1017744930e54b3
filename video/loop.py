"""Our denoise loop over diffusers' Wan modules and schedulers: noise, encode, schedule, denoise, decode.

Source: `WanPipeline` and `WanImageToVideoPipeline` of diffusers 0.42; tests/video/test_parity.py holds it to them.
Beyond them: several known frames at the start and a known last frame (`expand_timesteps`), a report between any two
steps that may raise, and a decoder that gives frames as soon as they are there.

Invariants: clips have 4k+1 frames; noise comes from a CPU generator, so a seed means the same on every device; nothing
is kept between two clips: schedulers are made anew, and the decoder's cache belongs to the call.
"""

import html
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import ftfy
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler
from einops import rearrange
from torch import Tensor

from video.checkpoints import Checkpoint
from video.conditions import Condition, put_known
from video.errors import InvalidClip, InvalidOutput

# (stage, steps done, steps in all); called before each step and after the last one. Raises Cancelled to stop.
Report = Callable[[str, int, int], None]

# Both passes of guidance in one batch up to here, one after the other above. Embedded model, one EPYC core, November
# 2026, milliseconds of one batch / two passes: 80 tokens 61/75, 324 210/222, 540 357/362, 900 775/754, 2160 2721/2233.
BATCHED_GUIDANCE_TOKENS = 512


@dataclass(frozen=True)
class Text:
    """Prompts as the transformer reads them, each `[1, M, D]`; negative is None where no guidance needs it."""

    positive: Tensor
    negative: Tensor | None


@dataclass(frozen=True)
class Guidance:
    """Scales of classifier-free guidance, off at 1 and below; `low_noise` is the second expert's."""

    scale: float
    low_noise: float | None = None

    @property
    def is_on(self) -> bool:
        """Whether any step needs the negative prompt."""
        return self.scale > 1 or (self.low_noise is not None and self.low_noise > 1)


def noise(checkpoint: Checkpoint, num_frames: int, height: int, width: int, seed: int) -> Tensor:
    """Draw the starting latents.

    Returns:
        `[1, C, F, H/8, W/8]` fp32, the same for a seed on every device.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    shape = checkpoint.latent_shape(num_frames, height, width)
    return torch.randn(shape, generator=generator).to(checkpoint.device)


@torch.inference_mode()
def encode_text(checkpoint: Checkpoint, prompt: str, negative_prompt: str | None) -> Text:
    """Encode a prompt and, if given, a negative one; both are padded to the model's fixed length."""
    positive = _encode_prompt(checkpoint, prompt)
    negative = None if negative_prompt is None else _encode_prompt(checkpoint, negative_prompt)
    return Text(positive, negative)


def schedule(checkpoint: Checkpoint, num_steps: int, flow_shift: float | None = None, name: str | None = None) -> Any:
    """Make a scheduler with its timesteps set.

    Args:
        checkpoint: gives the configuration.
        num_steps: 1 or more.
        flow_shift: of the sigmas; None: the checkpoint's.
        name: "unipc" or "flow_match_euler"; None: the checkpoint's.

    Raises:
        InvalidClip: the name is not known.
    """
    name = name or checkpoint.scheduler
    config = dict(checkpoint.scheduler_config)
    own_shift = config.get("flow_shift" if checkpoint.scheduler == "unipc" else "shift", 1.0)
    shift = own_shift if flow_shift is None else flow_shift
    scheduler_class: Any
    if name == "unipc":
        if checkpoint.scheduler != "unipc":
            config = {"prediction_type": "flow_prediction", "use_flow_sigmas": True}
        scheduler_class, changes = UniPCMultistepScheduler, {"flow_shift": shift}
    elif name == "flow_match_euler":
        if checkpoint.scheduler != "flow_match_euler":
            config = {}
        scheduler_class, changes = FlowMatchEulerDiscreteScheduler, {"shift": shift}
    else:
        raise InvalidClip(f"scheduler: must be unipc or flow_match_euler, got {name!r}.")
    scheduler = scheduler_class.from_config(config, **changes)
    scheduler.set_timesteps(num_steps, device=checkpoint.device)
    # without it a scheduler looks its first step up by timestep, and takes the second of two equal ones
    scheduler.set_begin_index(0)
    return scheduler


@torch.inference_mode()
def denoise(
    checkpoint: Checkpoint,
    latents: Tensor,
    scheduler: Any,
    text: Text,
    condition: Condition,
    guidance: Guidance,
    report: Report,
    show: Callable[[int, int, Tensor], None] | None = None,
) -> Tensor:
    """Walk from noise to a clip's latents.

    Args:
        checkpoint: the model.
        latents: `[1, C, F, H, W]` fp32 noise.
        scheduler: from `schedule`, used once.
        text: encoded prompts.
        condition: encoded frames.
        guidance: scales.
        report: called with stage "denoise" before each step and after the last.
        show: called after each step with its number from 1, their number, and the clip that the step has aimed at,
            `[1, C, F, H, W]`, which is the velocity followed to the end.

    Returns:
        `[1, C, F, H, W]` fp32, normalised, with the known latents in their places.
    """
    timesteps = scheduler.timesteps
    boundary = None
    if checkpoint.boundary_ratio is not None:
        boundary = checkpoint.boundary_ratio * scheduler.config.num_train_timesteps
    for step, t in enumerate(timesteps):
        report("denoise", step, len(timesteps))
        if boundary is None or t >= boundary:
            expert, scale = checkpoint.transformer, guidance.scale
        else:
            expert = checkpoint.transformer_2
            scale = guidance.scale if guidance.low_noise is None else guidance.low_noise
        velocity = _predict(checkpoint, expert, latents, t, text, condition, scale)
        if show is not None:
            aim = latents - scheduler.sigmas[step].to(latents) * velocity
            show(step + 1, len(timesteps), put_known(aim, condition))
        latents = scheduler.step(velocity, t, latents, return_dict=False)[0]
        if latents.is_cuda:
            # a step is reported when it is done, not when it is queued
            torch.cuda.synchronize(latents.device)
    report("denoise", len(timesteps), len(timesteps))
    return put_known(latents, condition)


@torch.inference_mode()
def decode(checkpoint: Checkpoint, latents: Tensor, report: Report) -> Iterator[Tensor]:
    """Decode latents one latent frame at a time.

    Args:
        checkpoint: the model.
        latents: `[1, C, F, H, W]` normalised.
        report: called with stage "decode" before each latent frame and after the last.

    Yields:
        `[n, H, W, 3]` uint8 on the CPU: one frame first, then four for each latent frame.

    Raises:
        InvalidOutput: a decoded value is NaN or infinite.
    """
    vae = checkpoint.vae
    raw = latents.to(vae.dtype) / (1.0 / checkpoint.latents_std) + checkpoint.latents_mean
    raw = vae.post_quant_conv(raw)
    num_latent_frames = raw.shape[2]
    # what each causal convolution remembers of the frames before, here and not on the module
    cache: list[Any] = [None] * vae._cached_conv_counts["decoder"]
    for index in range(num_latent_frames):
        report("decode", index, num_latent_frames)
        chunk = vae.decoder(raw[:, :, index : index + 1], feat_cache=cache, feat_idx=[0], first_chunk=index == 0)
        # clamping would hide an infinite value
        if not torch.isfinite(chunk).all():
            raise InvalidOutput(f"Latent frame {index} of {num_latent_frames} decodes to values that are not finite.")
        p = vae.config.patch_size or 1
        pixels = rearrange(chunk, "1 (c p q) f h w -> f (h q) (w p) c", p=p, q=p)
        yield ((pixels * 0.5 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8).cpu()
    report("decode", num_latent_frames, num_latent_frames)


def _predict(
    checkpoint: Checkpoint, expert: Any, latents: Tensor, t: Tensor, text: Text, condition: Condition, scale: float
) -> Tensor:
    """Predict the velocity `[1, C, F, H, W]` at timestep t, guided."""
    sample = put_known(latents, condition)
    if condition.channels is not None:
        sample = torch.cat([sample, condition.channels], dim=1)
    sample = sample.to(checkpoint.dtype)
    _, patch_height, patch_width = expert.config.patch_size
    tokens_a_frame = (sample.shape[3] // patch_height) * (sample.shape[4] // patch_width)
    if condition.free is None:
        timestep = t.reshape(1)
    else:
        timestep = (condition.free.flatten() * t).repeat_interleave(tokens_a_frame)[None]

    def run(prompts: Tensor) -> Tensor:
        batch = prompts.shape[0]
        velocity: Tensor = expert(
            hidden_states=sample.expand(batch, -1, -1, -1, -1),
            timestep=timestep.expand(batch, *timestep.shape[1:]),
            encoder_hidden_states=prompts,
            encoder_hidden_states_image=None if condition.image is None else condition.image.repeat(batch, 1, 1),
            return_dict=False,
        )[0]
        return velocity

    if scale <= 1 or text.negative is None:
        return run(text.positive)
    if is_guidance_batched(sample.shape[2] * tokens_a_frame):
        conditional, unconditional = run(torch.cat([text.positive, text.negative])).chunk(2)
    else:
        conditional, unconditional = run(text.positive), run(text.negative)
    return unconditional + scale * (conditional - unconditional)


def is_guidance_batched(num_tokens: int) -> bool:
    """Whether both passes of guidance run as one batch at this length."""
    return num_tokens <= BATCHED_GUIDANCE_TOKENS


def _encode_prompt(checkpoint: Checkpoint, prompt: str) -> Tensor:
    """Encode `[1, M, D]`; positions after the prompt's end are zero, as Wan was trained."""
    tokens = checkpoint.tokenizer(
        [clean_prompt(prompt)],
        padding="max_length",
        max_length=checkpoint.text_tokens,
        truncation=True,
        add_special_tokens=True,
        return_attention_mask=True,
        return_tensors="pt",
    )
    mask = tokens.attention_mask.to(checkpoint.device)
    hidden: Tensor = checkpoint.text_encoder(tokens.input_ids.to(checkpoint.device), mask).last_hidden_state
    hidden = hidden.to(checkpoint.dtype)
    return torch.where(mask[..., None] > 0, hidden, torch.zeros_like(hidden))


def clean_prompt(prompt: str) -> str:
    """Mend broken Unicode, undo HTML entities and join white space, as the model's own pipeline does."""
    mended = html.unescape(html.unescape(ftfy.fix_text(prompt)))
    return re.sub(r"\s+", " ", mended.strip()).strip()
