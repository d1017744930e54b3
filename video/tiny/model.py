"""The embedded Wan: configurations, builders, and checkpoints in diffusers' layout.

Sources: Wan 2.1 and 2.2 (arXiv 2503.20314) as diffusers 0.42 implements them.

Invariants:
- clips have 4k+1 frames and sides that are multiples of 16; latents are (z - mean) / std, `[B, 16, F, H/8, W/8]`;
- prompts are `MAX_TOKENS` (64) tokens long everywhere, since padding is attended;
- a conditioned latent frame is clean and has timestep 0 (`expand_timesteps`). Three conditions were trained:
  * first frame: latent 0 is the image encoded as a clip of one frame;
  * continuation: latents 0..k-1 (k = 2, 3, 4) are the last 4k-3 frames of the earlier clip, encoded as a clip;
  * last frame: the final latent is `encode(5 x the image)[:, :, 1]` (see `rest_latent`): the clip arrives at the image
    at frame -4 and rests on it, so that its last four frames show the image.
"""

from pathlib import Path
from typing import Any, Literal

import torch
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel
from torch import Tensor
from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

from video.tiny.tokenizer import MAX_TOKENS, build_tokenizer

Layout = Literal["t2v", "ti2v", "a14b-i2v"]
LATENT_CHANNELS = 16
SPATIAL_FACTOR, TEMPORAL_FACTOR, PATCH = 8, 4, 2

AUTOENCODER: dict[str, Any] = {
    "base_dim": 32,
    "decoder_base_dim": 32,
    "z_dim": LATENT_CHANNELS,
    "dim_mult": [1, 2, 2],
    "num_res_blocks": 1,
    "temperal_downsample": [True, True],
    "is_residual": False,
    "in_channels": 12,
    "out_channels": 12,
    "patch_size": 2,
    "scale_factor_temporal": TEMPORAL_FACTOR,
    "scale_factor_spatial": SPATIAL_FACTOR,
    "latents_mean": [0.0] * LATENT_CHANNELS,
    "latents_std": [1.0] * LATENT_CHANNELS,
}
TEXT_ENCODER: dict[str, Any] = {
    "d_model": 192,
    "d_kv": 64,
    "num_heads": 3,
    "d_ff": 384,
    "num_layers": 3,
    "relative_attention_num_buckets": 32,
    "relative_attention_max_distance": 64,
    "dropout_rate": 0.0,
    "feed_forward_proj": "gated-gelu",
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
    "use_cache": False,
}
TRANSFORMER: dict[str, Any] = {
    "patch_size": (1, PATCH, PATCH),
    "num_attention_heads": 2,
    "attention_head_dim": 128,
    "in_channels": LATENT_CHANNELS,
    "out_channels": LATENT_CHANNELS,
    "text_dim": TEXT_ENCODER["d_model"],
    "freq_dim": 256,
    "ffn_dim": 1024,
    "num_layers": 8,
    "cross_attn_norm": True,
    "qk_norm": "rms_norm_across_heads",
    "rope_max_seq_len": 256,
}
FLOW_SHIFT = 3.0

_RANDOM_WORDS = "a the red blue green yellow ball square car boat moves left right up down over sea snow at day night"
_RANDOM_AUTOENCODER = AUTOENCODER | {"base_dim": 4, "decoder_base_dim": 4}
_RANDOM_TEXT_ENCODER = TEXT_ENCODER | {"d_model": 32, "d_kv": 16, "num_heads": 2, "d_ff": 64, "num_layers": 2}
_RANDOM_TRANSFORMER = TRANSFORMER | {
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "text_dim": 32,
    "freq_dim": 32,
    "ffn_dim": 64,
    "num_layers": 2,
}


def build_autoencoder(**overrides: Any) -> AutoencoderKLWan:
    """Build the autoencoder with fresh weights; overrides replace entries of `AUTOENCODER`."""
    return AutoencoderKLWan(**(AUTOENCODER | overrides))


def build_text_encoder(vocab_size: int, **overrides: Any) -> UMT5EncoderModel:
    """Build the text encoder with fresh weights; overrides replace entries of `TEXT_ENCODER`."""
    return UMT5EncoderModel(UMT5Config(vocab_size=vocab_size, **(TEXT_ENCODER | overrides)))


def build_transformer(**overrides: Any) -> WanTransformer3DModel:
    """Build the denoiser with fresh weights; overrides replace entries of `TRANSFORMER`."""
    return WanTransformer3DModel(**(TRANSFORMER | overrides))


def build_scheduler(flow_shift: float = FLOW_SHIFT) -> UniPCMultistepScheduler:
    """Build the scheduler of the Wans: UniPC over flow sigmas, `flow_shift` at least 1."""
    return UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, num_train_timesteps=1000, flow_shift=flow_shift
    )


def rest_latent(vae: AutoencoderKLWan, image: Tensor) -> Tensor:
    """Encode an image as the final latent of a clip that arrives at it and rests there.

    Args:
        vae: the autoencoder.
        image: `[B, 3, H, W]` float in [-1, 1].

    Returns:
        `[B, 16, 1, H/8, W/8]`, normalised: latent 1 of a clip of five equal frames.
    """
    clip = image.unsqueeze(2).expand(-1, -1, 1 + TEMPORAL_FACTOR, -1, -1)
    latents = vae.encode(clip.to(vae.dtype)).latent_dist.mode()
    return normalize(vae, latents)[:, :, 1:]


def normalize(vae: AutoencoderKLWan, latents: Tensor) -> Tensor:
    """Scale raw latents `[B, 16, F, H, W]` to zero mean and unit deviation by the autoencoder's measured figures."""
    mean = torch.tensor(vae.config.latents_mean, device=latents.device, dtype=latents.dtype).view(1, -1, 1, 1, 1)
    std = torch.tensor(vae.config.latents_std, device=latents.device, dtype=latents.dtype).view(1, -1, 1, 1, 1)
    return (latents - mean) / std


def denormalize(vae: AutoencoderKLWan, latents: Tensor) -> Tensor:
    """Undo `normalize`, so that `[B, 16, F, H, W]` can be decoded."""
    mean = torch.tensor(vae.config.latents_mean, device=latents.device, dtype=latents.dtype).view(1, -1, 1, 1, 1)
    std = torch.tensor(vae.config.latents_std, device=latents.device, dtype=latents.dtype).view(1, -1, 1, 1, 1)
    return latents * std + mean


def save_checkpoint(
    directory: Path | str,
    *,
    vae: AutoencoderKLWan,
    text_encoder: UMT5EncoderModel,
    tokenizer: PreTrainedTokenizerFast,
    transformer: WanTransformer3DModel,
    transformer_2: WanTransformer3DModel | None = None,
    expand_timesteps: bool = True,
    boundary_ratio: float | None = None,
    flow_shift: float = FLOW_SHIFT,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Write a folder that `WanPipeline` and `WanImageToVideoPipeline` load; the modules are cast to dtype in place."""
    modules = {"vae": vae, "text_encoder": text_encoder, "transformer": transformer, "transformer_2": transformer_2}
    pipeline = WanPipeline(
        tokenizer=tokenizer,
        scheduler=build_scheduler(flow_shift),
        expand_timesteps=expand_timesteps,
        boundary_ratio=boundary_ratio,
        **{name: None if module is None else module.to(dtype) for name, module in modules.items()},
    )
    pipeline.save_pretrained(str(directory), safe_serialization=True)


def random_checkpoint(directory: Path | str, layout: Layout = "ti2v", seed: int = 0) -> Path:
    """Write a tiny checkpoint with random weights (about 200 KB) for unit tests.

    Args:
        directory: folder to fill.
        layout: "t2v" (one timestep a clip), "ti2v" (`expand_timesteps`, a timestep a token), or "a14b-i2v" (36 input
            channels, two experts, `boundary_ratio` 0.9).
        seed: of the weights.

    Returns:
        The folder as a path.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tokenizer = build_tokenizer(_RANDOM_WORDS.split())
        is_a14b = layout == "a14b-i2v"
        in_channels = 2 * LATENT_CHANNELS + TEMPORAL_FACTOR if is_a14b else LATENT_CHANNELS
        transformer_config = _RANDOM_TRANSFORMER | {"in_channels": in_channels}
        save_checkpoint(
            directory,
            vae=build_autoencoder(**_RANDOM_AUTOENCODER),
            text_encoder=build_text_encoder(len(tokenizer), **_RANDOM_TEXT_ENCODER),
            tokenizer=tokenizer,
            transformer=build_transformer(**transformer_config),
            transformer_2=build_transformer(**transformer_config) if is_a14b else None,
            expand_timesteps=layout == "ti2v",
            boundary_ratio=0.9 if is_a14b else None,
        )
    return Path(directory)


__all__ = [
    "AUTOENCODER",
    "FLOW_SHIFT",
    "LATENT_CHANNELS",
    "MAX_TOKENS",
    "TEXT_ENCODER",
    "TRANSFORMER",
    "Layout",
    "build_autoencoder",
    "build_scheduler",
    "build_text_encoder",
    "build_transformer",
    "denormalize",
    "normalize",
    "random_checkpoint",
    "rest_latent",
    "save_checkpoint",
]
