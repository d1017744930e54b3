"""What `gpu_check` runs: for each op real sizes, a few launch configurations, torch's own ways, a reference in fp64."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels.attention import AttentionConfig, attention_reference, attention_triton
from kernels.block_selection import pool_blocks_triton, select_blocks
from kernels.block_sparse_attention import BlockSparseConfig, block_sparse_attention_triton
from kernels.gpu_case import Case, Inputs, randn
from kernels.gpu_cases_rows import ROW_CASES
from kernels.gpu_cases_sampling import SAMPLING_CASES
from kernels.paged_attention import PagedConfig, paged_attention_reference, paged_attention_triton
from kernels.quantization.nvfp4 import (
    GemmConfig,
    GemvConfig,
    NVFP4Tensor,
    dequantize_nvfp4,
    nvfp4_linear_triton,
    quantize_nvfp4,
)
from kernels.rms_norm import rms_norm_reference, rms_norm_triton

WAN_480P_TOKENS, WAN_HEADS = 32_760, 12
SAMPLED_ROWS = 128


def _sdpa(backend: SDPBackend, causal: bool) -> Callable[[Inputs], torch.Tensor]:
    def run(x: Inputs) -> torch.Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(x["q"], x["k"], x["v"], is_causal=causal,
                                                  enable_gqa=x["q"].shape[1] != x["k"].shape[1])

    return run


def dense_case(
    name: str, batch: int, heads: int, kv_heads: int, n: int, head_dim: int, causal: bool, configs: tuple[Any, ...]
) -> Case:
    def make(device: torch.device, filled: bool) -> Inputs:
        q = randn(batch, heads, n, head_dim, device=device, filled=filled)
        k, v = (randn(batch, kv_heads, n, head_dim, device=device, filled=filled) for _ in range(2))
        rows = torch.randint(0, n, (SAMPLED_ROWS,), device=device).sort().values
        rows[0], rows[-1] = 0, n - 1
        return {"q": q, "k": k, "v": v, "rows": rows}

    def reference(x: Inputs) -> torch.Tensor:
        if not causal:
            return attention_reference(x["q"][:1, :, x["rows"]].double(), x["k"][:1].double(), x["v"][:1].double())[0]
        out = [attention_reference(x["q"][:1, :, r : r + 1].double(), x["k"][:1, :, : r + 1].double(),
                                   x["v"][:1, :, : r + 1].double())[0] for r in x["rows"].tolist()]
        return torch.cat(out, 2)

    peers = {"flash": _sdpa(SDPBackend.FLASH_ATTENTION, causal), "cudnn": _sdpa(SDPBackend.CUDNN_ATTENTION, causal)}
    return Case(
        name, f"B{batch} H{heads}/{kv_heads} N{n} D{head_dim}{' causal' if causal else ''}", make,
        lambda x, c: attention_triton(x["q"], x["k"], x["v"], causal=causal, scale=head_dim**-0.5, config=c),
        configs, reference, lambda x, out: (out[0] if isinstance(out, tuple) else out)[:1, :, x["rows"]], peers,
        4.0 * batch * heads * n * n * head_dim * (0.5 if causal else 1.0),
        2.0 * batch * n * head_dim * (2 * heads + 2 * kv_heads))


def sparse_case(name: str, heads: int, n: int, block: int, density: float, configs: tuple[Any, ...]) -> Case:
    head_dim = 128
    blocks = -(-n // block)
    chosen = round(blocks * density)

    def make(device: torch.device, filled: bool) -> Inputs:
        q, k, v = (randn(1, heads, n, head_dim, device=device, filled=filled) for _ in range(3))
        if not filled:
            indices = torch.empty(1, heads, blocks, chosen, dtype=torch.int32, device=device)
            counts = torch.empty(1, heads, blocks, dtype=torch.int32, device=device)
        else:
            forced = torch.zeros(blocks, dtype=torch.bool, device=device)
            forced[-1] = True  # the ragged last block in every list
            scores = torch.rand(1, heads, blocks, blocks, device=device)
            indices, counts = select_blocks(scores, chosen, forced=forced)
        return {"q": q, "k": k, "v": v, "indices": indices, "counts": counts}

    def picked(x: Inputs, out: Any) -> torch.Tensor:
        tensor: torch.Tensor = out[0] if isinstance(out, tuple) else out
        return torch.cat([tensor[:, :, b * block : min((b + 1) * block, n)] for b in (0, blocks // 2, blocks - 1)], 2)

    def reference(x: Inputs) -> torch.Tensor:
        parts = []
        for b in (0, blocks // 2, blocks - 1):
            ids = x["indices"][0, :, b].long()
            tokens = (ids[..., None] * block + torch.arange(block, device=ids.device)).flatten(1)
            is_key = (tokens < n)[:, None, :]
            tokens = tokens.clamp(max=n - 1)[..., None].expand(-1, -1, head_dim)
            k, v = (x[name][0].gather(1, tokens).double() for name in ("k", "v"))
            q = x["q"][0, :, b * block : min((b + 1) * block, n)].double()
            scores = (q @ k.transpose(1, 2) * head_dim**-0.5).masked_fill(~is_key, float("-inf"))
            parts.append(torch.softmax(scores, -1) @ v)
        return torch.cat(parts, 1)[None]

    return Case(
        name, f"H{heads} N{n} D{head_dim}, {chosen} of {blocks} blocks of {block}", make,
        lambda x, c: block_sparse_attention_triton(x["q"], x["k"], x["v"], x["indices"], x["counts"], block_q=block,
                                                   block_k=block, scale=head_dim**-0.5, config=c),
        configs, reference, picked, {}, 4.0 * heads * n * chosen * block * head_dim, 2.0 * n * head_dim * 4 * heads,
        peers_of="dense Wan 480p")


def select_case(name: str, heads: int, n: int, block: int) -> Case:
    def make(device: torch.device, filled: bool) -> Inputs:
        return {name: randn(1, heads, n, 128, device=device, filled=filled) for name in ("q", "k")}

    def launch(x: Inputs, c: Any) -> Any:
        scores = pool_blocks_triton(x["q"], block) @ pool_blocks_triton(x["k"], block).transpose(-1, -2)
        return scores, *select_blocks(scores, scores.shape[-1] // 8)

    def reference(x: Inputs) -> torch.Tensor:
        blocks = -(-n // block)
        sizes = (n - torch.arange(blocks, device=x["q"].device) * block).clamp(max=block)[:, None]
        q, k = (F.pad(x[t], (0, 0, 0, blocks * block - n)).unflatten(2, (blocks, block)).sum(3, dtype=torch.float64)
                / sizes for t in ("q", "k"))
        scores: torch.Tensor = q @ k.transpose(-1, -2)
        return scores

    return Case(name, f"H{heads} N{n} D128 blocks of {block}", make, launch, (None,), reference,
                lambda x, out: out[0], {}, 0.0, 2.0 * 2 * heads * n * 128)


def decode_case(name: str, batch: int, context: int, page: int, configs: tuple[Any, ...]) -> Case:
    heads, kv_heads, head_dim = 32, 8, 128
    pages = context // page

    def make(device: torch.device, filled: bool) -> Inputs:
        k, v = (randn(batch * pages, page, kv_heads, head_dim, device=device, filled=filled) for _ in range(2))
        table = torch.randperm(batch * pages, device=device).view(batch, pages).int()
        lengths = torch.full((batch,), context, dtype=torch.int32, device=device)
        q = randn(batch, heads, head_dim, device=device, filled=filled)
        # the same keys in the order that torch wants, no pages: a bound for what torch could do
        dense_k, dense_v = (x[table].view(batch, context, kv_heads, head_dim).transpose(1, 2) if filled else x
                            for x in (k, v))
        return {"q": q, "k": k, "v": v, "table": table, "lengths": lengths, "dense_k": dense_k, "dense_v": dense_v}

    def reference(x: Inputs) -> torch.Tensor:
        return paged_attention_reference(x["q"][:2].double(), x["k"], x["v"], x["table"][:2], x["lengths"][:2],
                                         scale=head_dim**-0.5, window=None)

    def contiguous_sdpa(x: Inputs) -> torch.Tensor:
        q = x["q"][:, :, None]
        return F.scaled_dot_product_attention(q, x["dense_k"], x["dense_v"], enable_gqa=True).squeeze(2)

    return Case(
        name, f"B{batch} H{heads}/{kv_heads} D{head_dim} context {context} page {page}", make,
        lambda x, c: paged_attention_triton(x["q"], x["k"], x["v"], x["table"], x["lengths"], scale=head_dim**-0.5,
                                            window=None, config=c),
        configs, reference, lambda x, out: out[:2], {"sdpa contiguous": contiguous_sdpa},
        4.0 * batch * heads * context * head_dim,
        4.0 * batch * context * kv_heads * head_dim, lambda x: [x, {**x, "q": x["q"].clone()}])


def _nvfp4_inputs(m: int, n: int, k: int, copies: int, device: torch.device, filled: bool) -> Inputs:
    if not filled:
        weight = NVFP4Tensor(torch.empty(n, k // 2, dtype=torch.uint8), torch.empty(n, k // 16).to(torch.float8_e4m3fn),
                             torch.ones(()))
        return {"x": torch.empty(m, k, dtype=torch.bfloat16), "weights": [weight]}
    weights = [quantize_nvfp4(torch.randn(n, k, device=device)) for _ in range(copies)]
    return {"x": randn(m, k, device=device, filled=True), "weights": weights,
            "dense": [dequantize_nvfp4(w, torch.bfloat16) for w in weights]}


def nvfp4_case(name: str, m: int, n: int, k: int, copies: int, configs: tuple[Any, ...]) -> Case:
    def launch(x: Inputs, c: Any) -> torch.Tensor:
        kind = "gemv" if isinstance(c, GemvConfig) else "gemm"
        return nvfp4_linear_triton(x["x"], x["weights"][0], **{kind: c})

    return Case(
        name, f"M{m} N{n} K{k}", lambda device, filled: _nvfp4_inputs(m, n, k, copies, device, filled), launch, configs,
        lambda x: x["x"][:256].double() @ dequantize_nvfp4(x["weights"][0], torch.float64).t(),
        lambda x, out: out[:256], {"bf16 linear": lambda x: F.linear(x["x"], x["dense"][0])}, 2.0 * m * n * k,
        n * k * 0.5625 + 2.0 * m * (n + k),
        lambda x: [{"x": x["x"], "weights": [w], "dense": [d]}
                   for w, d in zip(x["weights"], x["dense"], strict=True)])


def norm_case(name: str, rows: int, width: int) -> Case:
    def make(device: torch.device, filled: bool) -> Inputs:
        return {"x": randn(rows, width, device=device, filled=filled),
                "weight": randn(width, device=device, filled=filled)}

    return Case(
        name, f"{rows} x {width}", make, lambda x, c: rms_norm_triton(x["x"], x["weight"], None, 1e-6)[0], (None,),
        lambda x: rms_norm_reference(x["x"][:512].double(), x["weight"].double(), None, 1e-6)[0],
        lambda x, out: out[:512], {"F.rms_norm": lambda x: F.rms_norm(x["x"], (width,), x["weight"], 1e-6)},
        0.0, 4.0 * rows * width)


CASES: tuple[Case, ...] = (
    dense_case("dense Wan 480p", 1, WAN_HEADS, WAN_HEADS, WAN_480P_TOKENS, 128, False, (
        AttentionConfig(128, 128, 8, 2, True), AttentionConfig(128, 64, 8, 2, True, 128),
        AttentionConfig(64, 64, 4, 2, True), AttentionConfig(128, 64, 8, 3, True),
        AttentionConfig(64, 128, 4, 2, True), AttentionConfig(128, 128, 8, 3, True),
        AttentionConfig(128, 64, 8, 3, False))),
    sparse_case("sparse Wan 480p, 128", WAN_HEADS, WAN_480P_TOKENS, 128, 0.125, (
        BlockSparseConfig(128, 8, 2, True), BlockSparseConfig(64, 8, 2, True, 128), BlockSparseConfig(64, 8, 3, True),
        BlockSparseConfig(64, 8, 2, False))),
    sparse_case("sparse Wan 480p, 64", WAN_HEADS, WAN_480P_TOKENS, 64, 0.125, (
        BlockSparseConfig(64, 4, 2, True), BlockSparseConfig(64, 4, 3, True), BlockSparseConfig(64, 4, 3, False))),
    decode_case("decode B64, page 64", 64, 4096, 64, (
        PagedConfig(64, 4, 5, 4), PagedConfig(64, 4, 3, 4), PagedConfig(64, 4, 5, 2), PagedConfig(128, 8, 2, 4))),
    nvfp4_case("NVFP4 GEMV 14336x4096", 1, 14336, 4096, 8, (
        GemvConfig(8, 2048, 4, 1), GemvConfig(4, 4096, 4, 1), GemvConfig(8, 4096, 8, 1), GemvConfig(4, 2048, 4, 1),
        GemvConfig(8, 1024, 4, 1), GemvConfig(4, 1024, 2, 1), GemmConfig(16, 32, 256, 4, 4))),
    norm_case("RMS norm 32760x1536", WAN_480P_TOKENS, 1536),
    norm_case("RMS norm 32760x4096", WAN_480P_TOKENS, 4096),
    decode_case("decode B1, page 16", 1, 32768, 16, (PagedConfig(64, 4, 5, 64), PagedConfig(64, 4, 3, 64))),
    nvfp4_case("NVFP4 GEMV 4096x4096", 1, 4096, 4096, 16, (
        GemvConfig(4, 4096, 4, 1), GemvConfig(4, 2048, 4, 1), GemvConfig(2, 4096, 4, 1))),
    nvfp4_case("NVFP4 GEMM M2048", 2048, 14336, 4096, 2, (
        GemmConfig(128, 128, 64, 8, 3), GemmConfig(128, 256, 64, 8, 3))),
    nvfp4_case("NVFP4 M16", 16, 14336, 4096, 8, (GemmConfig(16, 64, 128, 4, 3), GemmConfig(16, 32, 256, 4, 4))),
    select_case("scores and top-k, 128", WAN_HEADS, WAN_480P_TOKENS, 128),
    dense_case("causal GQA 8192", 2, 32, 8, 8192, 128, True, (
        AttentionConfig(128, 128, 8, 2, True), AttentionConfig(128, 64, 8, 3, True))),
    *ROW_CASES,
    *SAMPLING_CASES,
    *(dense_case(f"dense D{d} causal", 1, 8, 2, 4000, d, True, (AttentionConfig(128, 64, 8, 2, d in (64, 256)),))
      for d in (64, 80, 96, 256)),
)
