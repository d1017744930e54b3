"""Training forwards of the tiny Wan: equal in value to diffusers' own, several times as fast on a GPU.

The autoencoder runs over whole clips instead of chunks of four frames, channels last. The denoiser keeps one timestep
a latent frame instead of one a token, embeds patches by a matrix product, and passes each block's weights as
arguments, so that one compiled function serves all blocks and sizes.

Invariants: `encode`, `decode` and `denoise` agree with `AutoencoderKLWan` and `WanTransformer3DModel` to rounding
(tests/video/tiny/test_train.py); weights stay fp32 and are cast where they are used.
"""

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

logger = logging.getLogger(__name__)


def training_dtype(device: torch.device) -> torch.dtype:
    """Choose the dtype of the matrix products: bf16 where the device multiplies in it, else fp32.

    On an EPYC of Zen 4, one thread: 218 against 69 GFLOP/s in the linears, 250 against 125 in the convolutions.
    """
    is_fast = device.type == "cuda" or torch.cpu._is_avx512_bf16_supported()
    return torch.bfloat16 if is_fast else torch.float32


def _attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    """Attend over `[B, H, N, D]`; bias is `[N, M]` bool (true where seen), or added to the scores.

    On the CPU torch's fused attention is three times slower backwards than three plain operations at these lengths.
    """
    if q.device.type != "cpu":
        if bias is not None and bias.dtype != torch.bool:
            bias = bias.to(q.dtype)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    scores = (q @ k.transpose(-1, -2)).float() * float(q.shape[-1]) ** -0.5
    if bias is not None:
        scores = scores.masked_fill(~bias, float("-inf")) if bias.dtype == torch.bool else scores + bias
    attended: Tensor = scores.softmax(-1).to(q.dtype) @ v
    return attended


def evens_first(rows: Tensor, heads: int) -> Tensor:
    """Reorder the channels `[H * D, ...]` of every head: even ones, then odd ones.

    Queries and keys may share any order of channels. In this one the rotation reads halves, not every second element,
    and a compiler vectorises it.
    """
    by_head: Tensor = rows.unflatten(0, (heads, -1, 2))
    return by_head.transpose(1, 2).reshape(rows.shape)


def _norm_silu(rows: Tensor, gamma: Tensor) -> Tensor:
    """RMS-normalise rows `[R, C]` over C, scale by gamma `[C]`, apply SiLU."""
    x = rows.float()
    length: Tensor = x.norm(dim=-1, keepdim=True)
    x = x / length.clamp_min(1e-12) * float(rows.shape[-1]) ** 0.5 * gamma
    activated: Tensor = F.silu(x).to(rows.dtype)
    return activated


def _block(
    x: Tensor,
    modulation: Tensor,
    text: Tensor,
    cos: Tensor,
    sin: Tensor,
    mask: Tensor | None,
    padding: Tensor | None,
    heads: int,
    dtype: torch.dtype,
    weights: tuple[Tensor, ...],
) -> Tensor:
    """Run one transformer block on `[B, N, D]`; modulation is `[B, F, 6, D]` fp32, cos and sin `[N, head_dim / 2]`.

    mask is added to the scores among the tokens, padding `[L]` to those of the text.
    """
    (table, wq, bq, wk, bk, wv, bv, wo, bo, q_gain, k_gain, cross_gain, cross_bias) = weights[:13]
    (cq, dq, ck, dk, cv, dv, co, do, cq_gain, ck_gain, up, up_bias, down, down_bias) = weights[13:]
    batch, frames, _, dim = modulation.shape
    shift, scale, gate, c_shift, c_scale, c_gate = (table + modulation).unsqueeze(3).unbind(2)

    def modulated(value: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        normed = F.layer_norm(value, (dim,), eps=1e-6).view(batch, frames, -1, dim)
        return (normed * (1 + scale) + shift).to(dtype).view_as(value)

    def split(value: Tensor) -> Tensor:
        by_head: Tensor = value.unflatten(-1, (heads, -1))
        return by_head.transpose(1, 2)

    def rotate(value: Tensor) -> Tensor:
        even, odd = value.unflatten(-1, (heads, 2, -1)).unbind(-2)
        halves = torch.cat((even * near - odd * far, even * far + odd * near), dim=-1)
        return halves.to(dtype).transpose(1, 2).contiguous()

    def linear(value: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.linear(value, weight.to(dtype), bias.to(dtype))

    near, far = cos.unsqueeze(1), sin.unsqueeze(1)
    wq, bq, q_gain, wk, bk, k_gain = (evens_first(part, heads) for part in (wq, bq, q_gain, wk, bk, k_gain))
    h = linear(modulated(x, scale, shift), torch.cat([wq, wk, wv]), torch.cat([bq, bk, bv]))
    q, k, v = h.chunk(3, dim=-1)
    q, k = F.rms_norm(q.float(), (dim,), q_gain, 1e-6), F.rms_norm(k.float(), (dim,), k_gain, 1e-6)
    attended = _attend(rotate(q), rotate(k), split(v), mask)
    h = linear(attended.transpose(1, 2).flatten(2), wo, bo).float()
    x = x + (h.view(batch, frames, -1, dim) * gate).view_as(x)

    h = F.layer_norm(x, (dim,), cross_gain, cross_bias, 1e-6).to(dtype)
    q = F.rms_norm(linear(h, cq, dq).float(), (dim,), cq_gain, 1e-6).to(dtype)
    k, v = linear(text, torch.cat([ck, cv]), torch.cat([dk, dv])).chunk(2, dim=-1)
    k = F.rms_norm(k.float(), (dim,), ck_gain, 1e-6).to(dtype)
    attended = _attend(split(q), split(k), split(v), padding)
    x = x + linear(attended.transpose(1, 2).flatten(2), co, do).float()

    h = F.gelu(linear(modulated(x, c_scale, c_shift), up, up_bias), approximate="tanh")
    h = linear(h, down, down_bias).float()
    return x + (h.view(batch, frames, -1, dim) * c_gate).view_as(x)


class Kernels:
    """The two functions that may be compiled, whether they are, and the dtype of the matrix products in training."""

    def __init__(self, is_compiled: bool = False, dtype: torch.dtype = torch.float32) -> None:
        self.is_compiled, self.dtype = is_compiled, dtype
        self.norm_silu: Callable[..., Tensor] = _norm_silu
        self.block: Callable[..., Tensor] = _block
        if is_compiled:
            # sizes that vary are marked where they are met; all others, such as channels, stay constants
            torch._dynamo.config.automatic_dynamic_shapes = False
            torch._dynamo.config.recompile_limit = 64
            self.norm_silu = torch.compile(_norm_silu, fullgraph=True)
            self.block = torch.compile(_block, fullgraph=True)

    @classmethod
    def choose(cls, device: torch.device, exercises: Sequence[Callable[["Kernels"], None]] = ()) -> "Kernels":
        """Compile on CUDA where every exercise, run forwards and backwards, proves that it works; log which it is."""
        dtype = training_dtype(device)
        if device.type != "cuda":
            return cls(dtype=dtype)
        try:
            kernels = cls(is_compiled=True, dtype=dtype)
            for exercise in exercises:
                exercise(kernels)
                torch.cuda.synchronize()
        except Exception as error:  # compiling raises whatever its parts raise
            logger.warning("torch.compile does not work here, running uncompiled: %s", str(error)[:2000])
            return cls(dtype=dtype)
        logger.info("torch.compile works here")
        return kernels


def block_weights(block: nn.Module) -> tuple[Tensor, ...]:
    """List a `WanTransformerBlock`'s weights in the order that the block function takes them."""
    b: Any = block
    weights = [b.scale_shift_table]
    for layer in (b.attn1.to_q, b.attn1.to_k, b.attn1.to_v, b.attn1.to_out[0]):
        weights += [layer.weight, layer.bias]
    weights += [b.attn1.norm_q.weight, b.attn1.norm_k.weight, b.norm2.weight, b.norm2.bias]
    for layer in (b.attn2.to_q, b.attn2.to_k, b.attn2.to_v, b.attn2.to_out[0]):
        weights += [layer.weight, layer.bias]
    weights += [b.attn2.norm_q.weight, b.attn2.norm_k.weight]
    for layer in (b.ffn.net[0].proj, b.ffn.net[2]):
        weights += [layer.weight, layer.bias]
    return tuple(weights)


def denoise(
    model: Any,
    latents: Tensor,
    timesteps: Tensor,
    text: Tensor,
    kernels: Kernels,
    mask: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    text_tokens: int | None = None,
    taps: dict[int, Tensor] | None = None,
) -> Tensor:
    """Predict the velocity as `WanTransformer3DModel` does.

    Args:
        model: the denoiser.
        latents: `[B, C, F, h, w]` float, noisy or clean a latent frame.
        timesteps: `[B, F]` float in [0, 1000], one a latent frame.
        text: `[B, L, text_dim]`.
        kernels: compiled or not.
        mask: `[N, N]` bool over the N = F * h/2 * w/2 tokens, true where a query may attend; None for all.
        dtype: of the matrix products.
        text_tokens: stands for a text of this many tokens of which all after the L-1st equal the last one (the padding,
            which Wan attends): the last one counts as often as it is left out. None: the text is whole.
        taps: gets the hidden state `[B, N, D]` after each block whose index is a key.

    Returns:
        `[B, C, F, h, w]` fp32.
    """
    _, _, frames, height, width = latents.shape
    embedder, dim = model.condition_embedder, model.patch_embedding.out_channels
    cos, sin = model.rope(latents)
    cos, sin = cos[0, :, 0, 0::2].float().contiguous(), sin[0, :, 0, 1::2].float().contiguous()
    tokens = rearrange(latents, "b c f (h p) (w q) -> b (f h w) (c p q)", p=2, q=2).to(dtype)
    patch: Any = model.patch_embedding
    x = F.linear(tokens, patch.weight.flatten(1).to(dtype), patch.bias.to(dtype)).float()
    time = embedder.time_embedder(embedder.timesteps_proj(timesteps.flatten())).unflatten(0, timesteps.shape)
    modulation = embedder.time_proj(F.silu(time)).unflatten(-1, (6, -1))
    first, second = embedder.text_embedder.linear_1, embedder.text_embedder.linear_2
    words = F.linear(text.to(dtype), first.weight.to(dtype), first.bias.to(dtype))
    words = F.linear(F.gelu(words, approximate="tanh"), second.weight.to(dtype), second.bias.to(dtype))
    heads = model.config.num_attention_heads
    padding = None
    if text_tokens is not None and text_tokens > text.shape[1]:
        padding = torch.zeros(text.shape[1], device=text.device)
        padding[-1] = math.log(text_tokens - text.shape[1] + 1)
    for index, block in enumerate(model.blocks):
        if kernels.is_compiled:
            for tensor, axes in ((x, (0, 1)), (modulation, (0, 1)), (words, (0,)), (cos, (0,)), (sin, (0,))):
                for axis in axes:
                    torch._dynamo.maybe_mark_dynamic(tensor, axis)
            if mask is not None:
                torch._dynamo.maybe_mark_dynamic(mask, 0)
                torch._dynamo.maybe_mark_dynamic(mask, 1)
        x = kernels.block(x, modulation, words, cos, sin, mask, padding, heads, dtype, block_weights(block))
        if taps is not None and index in taps:
            taps[index] = x
    shift, scale = (model.scale_shift_table + time.unsqueeze(2)).unsqueeze(3).unbind(2)
    x = F.layer_norm(x, (dim,), eps=1e-6).unflatten(1, (frames, -1))
    x = (x * (1 + scale) + shift).flatten(1, 2).to(dtype)
    out = F.linear(x, model.proj_out.weight.to(dtype), model.proj_out.bias.to(dtype)).float()
    return rearrange(out, "b (f h w) (p q c) -> b c f (h p) (w q)", f=frames, h=height // 2, w=width // 2, p=2, q=2)


def encode(vae: Any, clips: Tensor, kernels: Kernels, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Encode whole clips as `AutoencoderKLWan.encode` does chunk by chunk.

    Args:
        vae: the autoencoder.
        clips: `[B, T, H, W, 3]` uint8, or float in [-1, 1]; T is 4k+1.
        kernels, dtype: as for `denoise`.

    Returns:
        Mean and log-variance, each `[B, 16, F, H/8, W/8]` fp32, the log-variance within [-30, 20].
    """
    x = clips.float() / 127.5 - 1 if clips.dtype == torch.uint8 else clips
    x = rearrange(x, "b t (h p) (w q) c -> b t h w (c q p)", p=2, q=2).to(dtype).contiguous()
    encoder = vae.encoder
    x = _conv(x, encoder.conv_in)
    for layer in encoder.down_blocks:
        x = _resample(x, layer) if hasattr(layer, "resample") else _residual(x, layer, kernels)
    x = _middle(x, encoder.mid_block, kernels)
    x = _conv(_activate(x, encoder.norm_out, kernels), encoder.conv_out)
    moments = _conv(x, vae.quant_conv).float()
    mean, log_variance = moments.permute(0, 4, 1, 2, 3).chunk(2, dim=1)
    return mean, log_variance.clamp(-30.0, 20.0)


def decode(vae: Any, latents: Tensor, kernels: Kernels, dtype: torch.dtype = torch.float32) -> Tensor:
    """Decode `[B, 16, F, h, w]` raw latents to whole clips `[B, T, H, W, 3]` fp32, not clamped."""
    decoder = vae.decoder
    x = latents.permute(0, 2, 3, 4, 1).to(dtype).contiguous()
    x = _conv(_conv(x, vae.post_quant_conv), decoder.conv_in)
    x = _middle(x, decoder.mid_block, kernels)
    for block in decoder.up_blocks:
        for layer in block.resnets:
            x = _residual(x, layer, kernels)
        if block.upsamplers is not None:
            x = _resample(x, block.upsamplers[0])
    x = _conv(_activate(x, decoder.norm_out, kernels), decoder.conv_out).float()
    return rearrange(x, "b t h w (c q p) -> b t (h p) (w q) c", p=2, q=2)


def _conv(x: Tensor, layer: Any, time_stride: int = 1, is_padded: bool = True) -> Tensor:
    """Convolve `[B, T, H, W, C]` causally in time; `is_padded` adds the two zero frames in front."""
    side, ahead = layer._padding[0], layer._padding[4]
    if ahead and is_padded:
        x = F.pad(x, (0, 0, 0, 0, 0, 0, ahead, 0))
    weight, bias = layer.weight.to(x.dtype), layer.bias.to(x.dtype)
    out = F.conv3d(x.permute(0, 4, 1, 2, 3), weight, bias, stride=(time_stride, 1, 1), padding=(0, side, side))
    return out.permute(0, 2, 3, 4, 1)


def _activate(x: Tensor, norm: Any, kernels: Kernels) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    if kernels.is_compiled:
        torch._dynamo.maybe_mark_dynamic(rows, 0)
    return kernels.norm_silu(rows, norm.gamma.flatten()).view(x.shape)


def _residual(x: Tensor, layer: Any, kernels: Kernels) -> Tensor:
    shortcut = x if isinstance(layer.conv_shortcut, nn.Identity) else _conv(x, layer.conv_shortcut)
    x = _conv(_activate(x, layer.norm1, kernels), layer.conv1)
    return _conv(_activate(x, layer.norm2, kernels), layer.conv2) + shortcut


def _middle(x: Tensor, block: Any, kernels: Kernels) -> Tensor:
    x = _residual(x, block.resnets[0], kernels)
    for attention, layer in zip(block.attentions, block.resnets[1:], strict=True):
        x = _residual(x + _attend_frame(x, attention), layer, kernels)
    return x


def _attend_frame(x: Tensor, layer: Any) -> Tensor:
    """Attend within each frame, one head."""
    batch, frames, height, width, channels = x.shape
    rows = F.normalize(x.float(), dim=-1) * layer.norm.scale * layer.norm.gamma.flatten()
    rows = rows.to(x.dtype).reshape(batch * frames, height * width, channels)
    qkv = F.linear(rows, layer.to_qkv.weight.flatten(1).to(x.dtype), layer.to_qkv.bias.to(x.dtype))
    q, k, v = (part.unsqueeze(1) for part in qkv.chunk(3, dim=-1))
    out = _attend(q, k, v, None).squeeze(1)
    return F.linear(out, layer.proj.weight.flatten(1).to(x.dtype), layer.proj.bias.to(x.dtype)).view_as(x)


def _resample(x: Tensor, layer: Any) -> Tensor:
    """Halve or double the sides, and the frames after the first where the layer says so."""
    if layer.mode == "upsample3d" and x.shape[1] > 1:
        later = _conv(x[:, 1:], layer.time_conv)
        later = rearrange(later, "b t h w (two c) -> b (t two) h w c", two=2)
        x = torch.cat([x[:, :1], later], dim=1)
    batch, frames, height, width, channels = x.shape
    conv = layer.resample[1]
    weight, bias = conv.weight.to(x.dtype), conv.bias.to(x.dtype)
    images = x.reshape(batch * frames, height, width, channels)
    if layer.mode.startswith("up"):
        images = images[:, :, None, :, None].expand(-1, -1, 2, -1, 2, -1).reshape(-1, 2 * height, 2 * width, channels)
        images = F.conv2d(images.permute(0, 3, 1, 2), weight, bias, padding=1)
    else:
        images = F.pad(images, (0, 0, 0, 1, 0, 1))
        images = F.conv2d(images.permute(0, 3, 1, 2), weight, bias, stride=2)
    x = images.permute(0, 2, 3, 1).unflatten(0, (batch, frames))
    if layer.mode == "downsample3d" and frames > 1:
        x = torch.cat([x[:, :1], _conv(x, layer.time_conv, time_stride=2)], dim=1)
    return x
