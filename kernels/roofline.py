"""The roofline on paper: what each op must move and compute at real shapes, and the floor of its time on a card.

Floor = max(bytes / memory bandwidth, FLOPs / peak of the arithmetic). Bytes count each input once and each output once,
as if a cache held everything between; FLOPs count a multiply-add as two, softmax and the like as nothing beside the
products. So no kernel is faster, and a good one comes near. Nothing here was measured.
Peaks are NVIDIA's data sheets without sparsity: H200 SXM (4.8 TB/s; 989.5, 1,979 and 67 TFLOP/s in BF16, FP8 and
FP32), an eighth of HGX B200 (8 TB/s; 2,250, 4,500, 9,000 and 75 TFLOP/s in BF16, FP8, FP4 and FP32).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Arithmetic = Literal["bf16", "fp8", "fp4", "fp32"]
BF16, FP32 = 2, 4
# E2M1 codes and one E4M3 scale for sixteen of them
NVFP4 = 0.5 + 1 / 16


@dataclass(frozen=True)
class Card:
    """Hold a card's memory bandwidth in bytes/s and its peak FLOP/s by arithmetic; what it cannot do is missing."""

    bandwidth: float
    peak: Mapping[Arithmetic, float]


CARDS = {
    "H200": Card(4.8e12, {"bf16": 989.5e12, "fp8": 1979e12, "fp32": 67e12}),
    "B200": Card(8e12, {"bf16": 2250e12, "fp8": 4500e12, "fp4": 9000e12, "fp32": 75e12}),
}


@dataclass(frozen=True)
class Work:
    """Hold what an op does at one shape: FLOPs in one arithmetic, bytes to and from memory."""

    op: str
    shape: str
    arithmetic: Arithmetic
    flops: float
    bytes: float


@dataclass(frozen=True)
class Video:
    """Hold a Wan transformer's sizes at a resolution: tokens of 81 frames, heads of 128, width of the MLP, layers."""

    name: str
    tokens: int
    heads: int
    mlp: int
    layers: int


@dataclass(frozen=True)
class Decode:
    """Hold a step of an 8B model (Llama 3.1): sequences, tokens of context each."""

    batch: int
    context: int = 4096
    heads: int = 32
    kv_heads: int = 8
    mlp: int = 14_336
    vocab: int = 128_256

    @property
    def name(self) -> str:
        return f"8B decode, batch {self.batch}, context {self.context}"


# latents of 21 frames by 60 x 104 and 90 x 160, in patches of 1 x 2 x 2
SHAPES = (Video("Wan 2.1 1.3B, 480p", 21 * 30 * 52, 12, 8960, 30),
          Video("Wan 2.1 14B, 720p", 21 * 45 * 80, 40, 13_824, 40))
STEPS = (Decode(1), Decode(64))
HEAD_DIM, TILE, DENSITY = 128, 128, 0.125
DRAFTS = 4


def floor_us(work: Work, card: Card) -> tuple[float, str] | None:
    """Return the floor in microseconds and what sets it, "memory" or "compute"; None without such a unit."""
    if work.arithmetic not in card.peak:
        return None
    memory, compute = work.bytes / card.bandwidth * 1e6, work.flops / card.peak[work.arithmetic] * 1e6
    return max(memory, compute), "memory" if memory >= compute else "compute"


def works() -> list[Work]:
    """Return every op at every shape where it occurs."""
    return [work for video in SHAPES for work in _video(video)] + [work for step in STEPS for work in _decode(step)]


def rows() -> list[dict[str, Any]]:
    """Return the table's rows: FLOPs and bytes, and for each card the floor in microseconds, four digits."""
    result = []
    for work in works():
        row: dict[str, Any] = {"op": work.op, "shape": work.shape, "arithmetic": work.arithmetic,
                               "flops": round(work.flops), "bytes": round(work.bytes)}
        for name, card in CARDS.items():
            floor = floor_us(work, card)
            row[name] = None if floor is None else {"floor_us": float(f"{floor[0]:.4g}"), "bound": floor[1]}
        result.append(row)
    return result


def _video(video: Video) -> list[Work]:
    n, h, d = video.tokens, video.heads, HEAD_DIM
    width, tensor = h * d, n * h * d
    blocks = -(-n // TILE)
    chosen = round(blocks * DENSITY)
    dense, sparse = 4.0 * h * n * n * d, 4.0 * h * n * chosen * TILE * d
    lse, lists = FP32 * h * n, FP32 * h * blocks * chosen
    name = video.name
    # a layer's products of tokens: q, k, v and output, query and output of cross-attention, both of the MLP
    linears = 2.0 * n * (6 * width * width + 2 * width * video.mlp)
    return [
        Work("attention", name, "bf16", dense, 4 * BF16 * tensor + lse),
        Work("block_sparse_attention, 12.5 %", name, "bf16", sparse, 4 * BF16 * tensor + lse + lists),
        # S, dP, dV, dK, dQ against the forward's S and O; q, k, v, out, dO in, three gradients out
        Work("block_sparse_attention, 12.5 %, backward", name, "bf16", 2.5 * sparse, 8 * BF16 * tensor + lse + lists),
        Work("block_scores", name, "fp32", 2.0 * tensor + 2.0 * h * blocks * blocks * d,
             2 * BF16 * tensor + FP32 * h * blocks * blocks),
        Work("select_blocks", name, "fp32", 0.0, FP32 * h * blocks * blocks + lists),
        Work("tile_order", name, "fp32", 0.0, 2 * BF16 * tensor),
        Work("tile_order, hidden states there and back once a forward", name, "fp32", 0.0, 4 * BF16 * tensor),
        Work("tile_order, q, k, v and output in every layer", name, "fp32", 0.0, 8 * BF16 * tensor * video.layers),
        # beside which these stand; its bytes are those of the weights alone
        Work("forward, products and block_sparse_attention, 12.5 %", name, "bf16", video.layers * (linears + sparse),
             BF16 * video.layers * (6 * width * width + 2 * width * video.mlp)),
        Work("rotary_3d", name, "fp32", 3.0 * tensor, 2 * BF16 * tensor),
        Work("rms_norm over heads", name, "fp32", 4.0 * tensor, 2 * BF16 * tensor),
        Work("add_layer_norm_modulate", name, "fp32", 10.0 * tensor, 4 * BF16 * tensor),
        Work("gelu", name, "fp32", 8.0 * n * video.mlp, 2 * BF16 * n * video.mlp),
        *_linears(name, n, video.mlp, width),
    ]


def _decode(step: Decode) -> list[Work]:
    b, h, kv, d = step.batch, step.heads, step.kv_heads, HEAD_DIM
    width, name = h * d, step.name
    scores, cached = 4.0 * b * h * step.context * d, 2 * b * step.context * kv * d
    ends = 2 * BF16 * b * h * d  # queries in, outputs out
    return [
        Work("paged_attention", name, "bf16", scores, BF16 * cached + ends),
        Work("paged_attention, FP8 keys and values", name, "bf16", scores, cached + ends),
        Work("kv_store", name, "fp32", 0.0, 2 * 2 * BF16 * b * kv * d),
        Work("rotary", name, "fp32", 3.0 * b * (h + kv) * d, 2 * BF16 * b * (h + kv) * d + FP32 * b * d),
        Work("rms_norm", name, "fp32", 4.0 * b * width, 2 * BF16 * b * width + BF16 * width),
        Work("head_rms_norm", name, "fp32", 4.0 * b * (h + kv) * d, 2 * BF16 * b * (h + kv) * d),
        Work("silu_mul", name, "fp32", 5.0 * b * step.mlp, 3 * BF16 * b * step.mlp),
        *_linears(name, b, 2 * step.mlp, width),
        # logits in, a token out
        Work("sampling", name, "fp32", 2.0 * b * step.vocab, BF16 * b * step.vocab + 8 * b),
        # the last token's row of target and draft
        Work("spec_accept", name, "fp32", 4.0 * b * step.vocab, 2 * FP32 * b * step.vocab + 8 * b * (DRAFTS + 1)),
    ]


def _linears(name: str, m: int, n: int, k: int) -> list[Work]:
    """The widest projection of the MLP in each format: `[m, k]` by `[n, k]`."""
    flops, ends = 2.0 * m * n * k, BF16 * m * (n + k)
    return [
        Work("fp8_linear", name, "fp8", flops, ends + n * k + FP32 * n),
        Work("nvfp4_linear, W4A16", name, "bf16", flops, ends + NVFP4 * n * k),
        Work("nvfp4_linear, W4A4", name, "fp4", flops, ends + NVFP4 * n * k),
    ]
