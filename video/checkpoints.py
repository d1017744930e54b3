"""Load a Wan-family checkpoint from a local folder in diffusers' layout.

Source: the Wan pipelines of diffusers 0.42 and their `model_index.json`. Three layouts are known:
- "wan-t2v": text only, one timestep a clip (Wan 2.1, and A14B with two experts);
- "wan-ti2v": `expand_timesteps`, a timestep a token, so that known latent frames stand clean at timestep 0;
- "wan-i2v": mask and image latents joined to the noise as channels (Wan 2.1 with an image encoder, A14B without).

Invariants: safetensors only, no network, every weight present and of the right shape or CheckpointError. The
autoencoder is fp32 everywhere; on a CPU all is fp32; on a GPU the rest is bf16 but for the modules that diffusers
names `_keep_in_fp32_modules` (rope, time_embedder, scale_shift_table, norms).
"""

import hashlib
import json
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from torch import Tensor

from video.attention import DenseAttention
from video.cpu import speed_up_convolutions
from video.errors import CheckpointError

logger = logging.getLogger(__name__)

Layout = Literal["wan-t2v", "wan-ti2v", "wan-i2v"]

SCHEDULERS = {
    "UniPCMultistepScheduler": "unipc",
    "FlowMatchEulerDiscreteScheduler": "flow_match_euler",
}
# diffusers' pipelines pad to 512 unless the tokenizer holds less
_MAX_TEXT_TOKENS = 512
_HASHED = (".safetensors", ".json", ".model", ".txt")
_NOT_HASHED = ("card.json",)


@dataclass(frozen=True)
class Checkpoint:
    """A loaded model; set once by `load_checkpoint`, never changed by a clip."""

    path: Path
    layout: Layout
    device: torch.device
    dtype: torch.dtype
    weights_hash: str
    card: dict[str, Any] | None
    tokenizer: Any
    text_encoder: Any
    # AutoencoderKLWan; diffusers' classes carry no types that say more
    vae: Any
    # WanTransformer3DModel: the expert for high noise; alone, it does every step
    transformer: Any
    transformer_2: Any | None
    boundary_ratio: float | None
    image_encoder: Any | None
    image_processor: Any | None
    scheduler: str
    scheduler_config: dict[str, Any]
    text_tokens: int
    latents_mean: Tensor = field(repr=False)
    latents_std: Tensor = field(repr=False)

    @property
    def spatial_factor(self) -> int:
        """Pixels a latent pixel covers, on each side."""
        return int(self.vae.config.scale_factor_spatial)

    @property
    def temporal_factor(self) -> int:
        """Frames a latent frame covers, but for the first."""
        return int(self.vae.config.scale_factor_temporal)

    @property
    def latent_channels(self) -> int:
        """Channels of the latents."""
        return int(self.vae.config.z_dim)

    @property
    def size_multiple(self) -> int:
        """What width and height must be multiples of: one patch of latent pixels."""
        return self.spatial_factor * int(self.transformer.config.patch_size[1])

    def latent_shape(self, num_frames: int, height: int, width: int) -> tuple[int, int, int, int, int]:
        """Give `[1, C, F, H, W]` of the latents of a clip of 4k+1 frames."""
        frames = (num_frames - 1) // self.temporal_factor + 1
        return (1, self.latent_channels, frames, height // self.spatial_factor, width // self.spatial_factor)

    def num_tokens(self, num_frames: int, height: int, width: int) -> int:
        """Count the tokens that attend to each other."""
        frames = (num_frames - 1) // self.temporal_factor + 1
        return frames * (height // self.size_multiple) * (width // self.size_multiple)


def load_checkpoint(
    path: Path | str, device: str = "cpu", hash_cache: Path | None = None, dtype: torch.dtype | None = None
) -> Checkpoint:
    """Load a model for inference.

    Args:
        path: folder with `model_index.json`.
        device: "cpu" or "cuda:N".
        hash_cache: file that remembers the hashes of large files by size and time; None: hash them all.
        dtype: of transformer and text encoder; None: fp32 on a CPU, bf16 on a GPU.

    Raises:
        CheckpointError: a file is missing, broken or of another kind; the message names it relative to the folder.
    """
    folder = Path(path)
    index = _read_json(folder, "model_index.json")
    target = torch.device(device)
    dtype = dtype or (torch.float32 if target.type == "cpu" else torch.bfloat16)
    scheduler_config = _read_json(folder, "scheduler/scheduler_config.json")
    scheduler = SCHEDULERS.get(str(scheduler_config.get("_class_name")))
    if scheduler is None:
        raise CheckpointError(
            f"scheduler: must be one of {', '.join(SCHEDULERS)}, got {scheduler_config.get('_class_name')!r}."
        )
    weights_hash = hash_weights(folder, hash_cache)
    transformer = _load_transformer(folder, "transformer", dtype)
    second = _load_transformer(folder, "transformer_2", dtype) if _has(index, "transformer_2") else None
    vae = _load_diffusers(AutoencoderKLWan, folder, "vae", torch.float32)
    tokenizer, text_encoder = _load_text(folder, dtype)
    image_encoder, image_processor = _load_image_encoder(folder) if _has(index, "image_encoder") else (None, None)
    layout = _find_layout(index, transformer.config, vae.config)
    if transformer.config.image_dim is not None and image_encoder is None:
        raise CheckpointError("image_encoder: the transformer takes image embeddings, and the folder has no encoder.")
    boundary_ratio = index.get("boundary_ratio")
    if (second is None) != (boundary_ratio is None):
        raise CheckpointError("model_index.json: transformer_2 and boundary_ratio come together or not at all.")
    for model in (transformer, second, vae, text_encoder, image_encoder):
        if model is not None:
            model.requires_grad_(False).eval().to(target)
    if target.type == "cpu":
        for module in (transformer, second, vae):
            if module is not None:
                speed_up_convolutions(module)
    statistics = (1, vae.config.z_dim, 1, 1, 1)
    return Checkpoint(
        path=folder,
        layout=layout,
        device=target,
        dtype=dtype,
        weights_hash=weights_hash,
        card=_read_json(folder, "card.json") if (folder / "card.json").is_file() else None,
        tokenizer=tokenizer,
        text_encoder=text_encoder,
        vae=vae,
        transformer=transformer,
        transformer_2=second,
        boundary_ratio=boundary_ratio,
        image_encoder=image_encoder,
        image_processor=image_processor,
        scheduler=scheduler,
        scheduler_config={key: value for key, value in scheduler_config.items() if not key.startswith("_")},
        text_tokens=min(_MAX_TEXT_TOKENS, int(tokenizer.model_max_length)),
        latents_mean=torch.tensor(vae.config.latents_mean, device=target).view(statistics),
        latents_std=torch.tensor(vae.config.latents_std, device=target).view(statistics),
    )


def hash_weights(folder: Path, cache: Path | None = None) -> str:
    """Hash what decides a model's output: weights, configurations, tokenizer; not the card.

    Returns:
        "sha256:" and 64 hex digits: the hash over one line "relative path, tab, sha256 of the file" for each file, in
        the order of the paths.
    """
    known = _read_cache(cache)
    files = sorted(
        path for path in folder.rglob("*") if path.suffix in _HASHED and path.name not in _NOT_HASHED and path.is_file()
    )
    total = hashlib.sha256()
    for path in files:
        about = path.stat()
        key = f"{path.resolve()}:{about.st_size}:{about.st_mtime_ns}"
        if key not in known:
            with path.open("rb") as file:
                known[key] = hashlib.file_digest(file, "sha256").hexdigest()
        total.update(f"{path.relative_to(folder).as_posix()}\t{known[key]}\n".encode())
    if cache is not None:
        try:
            cache.write_text(json.dumps(known))
        except OSError as error:
            # on a full disk they are hashed again at the next start
            logger.warning("the cache of weight hashes could not be written (errno %s)", error.errno)
    return f"sha256:{total.hexdigest()}"


def _read_cache(cache: Path | None) -> dict[str, str]:
    if cache is None or not cache.is_file():
        return {}
    try:
        return dict(json.loads(cache.read_text()))
    except (json.JSONDecodeError, TypeError, ValueError):
        logger.warning("the cache of weight hashes is broken and is made anew")
        return {}


def _find_layout(index: dict[str, Any], transformer: Any, vae: Any) -> Layout:
    image_channels = vae.z_dim + vae.scale_factor_temporal
    if transformer.in_channels == vae.z_dim:
        return "wan-ti2v" if index.get("expand_timesteps") else "wan-t2v"
    if transformer.in_channels == vae.z_dim + image_channels and not index.get("expand_timesteps"):
        return "wan-i2v"
    raise CheckpointError(
        f"transformer: in_channels must be {vae.z_dim} (text) or {vae.z_dim + image_channels} (image joined as "
        f"channels) for this autoencoder, got {transformer.in_channels}."
    )


def _has(index: dict[str, Any], name: str) -> bool:
    return bool(index.get(name) and index[name][0])


def _load_transformer(folder: Path, name: str, dtype: torch.dtype) -> Any:
    model = _load_diffusers(WanTransformer3DModel, folder, name, dtype)
    model.set_attn_processor(DenseAttention())
    return model


def _load_diffusers(model_class: Any, folder: Path, name: str, dtype: torch.dtype) -> Any:
    config = _read_json(folder, f"{name}/config.json")
    if config.get("_class_name") != model_class.__name__:
        raise CheckpointError(f"{name}: must be a {model_class.__name__}, got {config.get('_class_name')!r}.")
    _check_safetensors(folder, name)
    try:
        model, report = model_class.from_pretrained(
            str(folder / name),
            dtype=dtype,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
        )
    except Exception as error:
        # diffusers, safetensors and torch each raise their own for a truncated or wrong-shaped file
        raise CheckpointError(f"{name}: the weights do not load ({_first_line(error, folder)}).") from error
    _check_report(name, report)
    return model


def _load_text(folder: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    from transformers import AutoTokenizer, UMT5EncoderModel

    encoder_class: Any = UMT5EncoderModel
    _check_safetensors(folder, "text_encoder")
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder / "tokenizer"), local_files_only=True)
        encoder, report = encoder_class.from_pretrained(
            str(folder / "text_encoder"),
            dtype=dtype,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
        )
    except Exception as error:
        raise CheckpointError(f"text_encoder: does not load ({_first_line(error, folder)}).") from error
    _check_report("text_encoder", report)
    return tokenizer, encoder


def _load_image_encoder(folder: Path) -> tuple[Any, Any]:
    from transformers import CLIPImageProcessor, CLIPVisionModel

    encoder_class: Any = CLIPVisionModel
    _check_safetensors(folder, "image_encoder")
    try:
        processor = CLIPImageProcessor.from_pretrained(str(folder / "image_processor"), local_files_only=True)
        encoder, report = encoder_class.from_pretrained(
            str(folder / "image_encoder"),
            dtype=torch.float32,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
        )
    except Exception as error:
        raise CheckpointError(f"image_encoder: does not load ({_first_line(error, folder)}).") from error
    _check_report("image_encoder", report)
    return encoder, processor


def _check_safetensors(folder: Path, name: str) -> None:
    if not any((folder / name).glob("*.safetensors")):
        raise CheckpointError(f"{name}: must hold its weights as safetensors; none are there.")


def _check_report(name: str, report: dict[str, Any]) -> None:
    for fault, meaning in (
        ("missing_keys", "lack"),
        ("mismatched_keys", "have the wrong shape for"),
        ("error_msgs", "do not load:"),
    ):
        found = sorted(str(key) for key in report.get(fault) or ())
        if found:
            raise CheckpointError(f"{name}: the weights {meaning} {found[0]}" + _more(len(found)))


def _more(count: int) -> str:
    return "." if count == 1 else f" and {count - 1} more."


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    try:
        values = json.loads((folder / name).read_text())
    except FileNotFoundError as error:
        raise CheckpointError(f"{name}: is missing; the folder must be in diffusers' layout.") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{name}: is not JSON that can be read.") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{name}: must be a JSON object.")
    return values


def _first_line(error: Exception, folder: Path) -> str:
    lines = str(error).replace(str(folder), "").strip().splitlines() or ["no detail"]
    return f"{type(error).__name__}: {lines[0]}"
