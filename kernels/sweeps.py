"""What `autotune` tries for each op, and which options it times: the candidates and how to launch them."""

import torch

from kernels.attention import AttentionConfig, attention_triton, default_config
from kernels.autotune import Choice, Tuner
from kernels.block_sparse_attention import BlockSparseConfig, block_sparse_attention_triton
from kernels.block_sparse_attention import default_config as default_block_sparse_config
from kernels.dispatch import capability
from kernels.paged_attention import PagedConfig, default_paged_config, paged_attention_triton
from kernels.quantization.nvfp4 import (
    GemmConfig,
    GemvConfig,
    NVFP4Tensor,
    default_gemm_config,
    nvfp4_linear_triton,
)
from kernels.quantization.nvfp4_w4a4 import W4A4Config, default_w4a4_config, nvfp4_w4a4_linear_triton
from kernels.sampling import SampleConfig, sample_triton
from kernels.sampling_params import SamplingContext, SamplingParams
from kernels.spec_accept import SpecAcceptConfig, spec_accept_triton

DENSE = (AttentionConfig(128, 128, 8, 2, True), AttentionConfig(128, 64, 8, 2, True),
         AttentionConfig(128, 64, 8, 3, True), AttentionConfig(64, 128, 4, 2, True),
         AttentionConfig(64, 64, 4, 2, True), AttentionConfig(128, 64, 8, 3, False))
PAGED = (PagedConfig(64, 4, 5, block_m=16), PagedConfig(64, 4, 2, block_m=16), PagedConfig(128, 8, 2, block_m=16),
         PagedConfig(32, 4, 3, block_m=32), PagedConfig(64, 4, 2, block_m=64), PagedConfig(32, 8, 3, block_m=64))
GEMV = (GemvConfig(4, 4096, 4, 1), GemvConfig(4, 2048, 4, 1), GemvConfig(8, 1024, 4, 1), GemvConfig(2, 4096, 4, 1),
        GemvConfig(8, 4096, 8, 1))
GEMM = (GemmConfig(16, 32, 256, 4, 4), GemmConfig(16, 128, 128, 4, 3), GemmConfig(64, 64, 64, 4, 3),
        GemmConfig(128, 256, 64, 8, 3), GemmConfig(128, 128, 64, 8, 4))
W4A4 = (W4A4Config(128, 128, 256, 8, 2, True), W4A4Config(128, 256, 256, 8, 3, False),
        W4A4Config(128, 128, 256, 8, 4, False))
SAMPLE = tuple(SampleConfig(block, adjust, choose) for block, adjust, choose in
               ((4096, 8, 16), (4096, 4, 16), (8192, 8, 16), (2048, 4, 8), (4096, 8, 8)))
SPEC_ACCEPT = (SpecAcceptConfig(4096, 8), SpecAcceptConfig(8192, 16), SpecAcceptConfig(2048, 4),
               SpecAcceptConfig(4096, 16))
NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}


def attention_config(tuner: Tuner, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool) -> Choice:
    """Choose an AttentionConfig for tensors as `attention` takes them (validated)."""
    shape = {"batch": q.shape[0], "heads": q.shape[1], "kv_heads": k.shape[1], "queries": q.shape[2],
             "keys": k.shape[2], "d": q.shape[3], "packed": 0, "causal": int(causal)}
    return tuner.choose("attention", shape, DENSE,
                        lambda c: attention_triton(q, k, v, causal=causal, scale=q.shape[3] ** -0.5, config=c),
                        default_config(q), dtype=NAMES[q.dtype])


def block_sparse_attention_config(
    tuner: Tuner, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block_indices: torch.Tensor,
    block_counts: torch.Tensor, *, block_q: int, block_k: int,
) -> Choice:
    """Choose a BlockSparseConfig for tensors as `block_sparse_attention` takes them (validated)."""
    shape = {"batch": q.shape[0], "heads": q.shape[1], "queries": q.shape[2], "keys": k.shape[2], "d": q.shape[3],
             "blocks": block_indices.shape[3], "block_q": block_q, "block_k": block_k}
    configs = [BlockSparseConfig(block_n, warps, stages, use_tma) for block_n in (64, 128) if block_n <= block_k
               for warps in (4, 8) for stages in (2, 3) for use_tma in (True, False)]
    return tuner.choose(
        "block_sparse_attention", shape, configs,
        lambda c: block_sparse_attention_triton(q, k, v, block_indices, block_counts, block_q=block_q, block_k=block_k,
                                                scale=q.shape[3] ** -0.5, config=c),
        default_block_sparse_config(q, block_q, block_k), dtype=NAMES[q.dtype])


def paged_attention_config(
    tuner: Tuner, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor,
    context_lens: torch.Tensor, *, cu_seqlens_q: torch.Tensor | None = None, k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> Choice:
    """Choose a PagedConfig for tensors as `paged_attention` takes them (validated)."""
    batch = block_table.shape[0]
    rows = max(1, q.shape[0] // max(batch, 1)) * (q.shape[1] // k_cache.shape[2])
    shape = {"batch": batch, "rows": rows, "kv_heads": k_cache.shape[2], "d": q.shape[2], "dv": v_cache.shape[3],
             "page": k_cache.shape[1], "longest": block_table.shape[1] * k_cache.shape[1],
             "element": k_cache.element_size()}

    def run(config: PagedConfig) -> torch.Tensor:
        return paged_attention_triton(q, k_cache, v_cache, block_table, context_lens, cu_seqlens_q=cu_seqlens_q,
                                      k_scale=k_scale, v_scale=v_scale, scale=q.shape[2] ** -0.5, window=None,
                                      config=config)

    return tuner.choose("paged_attention", shape, PAGED, run, default_paged_config(q, rows), dtype=NAMES[q.dtype])


def nvfp4_config(tuner: Tuner, x: torch.Tensor, weight: NVFP4Tensor) -> Choice:
    """Choose a GemvConfig for one token, else a GemmConfig, for `nvfp4_linear`."""
    n, k = weight.shape
    m = x.numel() // k
    shape = {"m": m, "n": n, "k": k}
    if m == 1:
        return tuner.choose("nvfp4_gemv", shape, GEMV, lambda c: nvfp4_linear_triton(x, weight, gemv=c), GemvConfig(),
                            dtype=NAMES[x.dtype])
    return tuner.choose("nvfp4_gemm", shape, GEMM, lambda c: nvfp4_linear_triton(x, weight, gemm=c),
                        default_gemm_config(m, x.dtype), dtype=NAMES[x.dtype])


def w4a4_config(
    tuner: Tuner, x: torch.Tensor, weight: NVFP4Tensor, input_scale: torch.Tensor, swizzled: torch.Tensor | None = None
) -> Choice:
    """Choose a W4A4Config for `nvfp4_w4a4_linear`."""
    n, k = weight.shape
    m = x.numel() // k
    return tuner.choose(
        "nvfp4_w4a4", {"m": m, "n": n, "k": k}, W4A4,
        lambda c: nvfp4_w4a4_linear_triton(x, weight, input_scale, swizzled=swizzled, config=c),
        default_w4a4_config(m, swizzled is not None, capability(x.device)), dtype=NAMES[x.dtype])


def sample_config(
    tuner: Tuner, logits: torch.Tensor, params: SamplingParams, context: SamplingContext, *, num_logprobs: int | None,
    with_probabilities: bool,
) -> Choice:
    """Choose a SampleConfig for arguments as `sample` takes them (validated); what is cut or asked for is no bucket."""
    return tuner.choose(
        "sample", {"batch": logits.shape[0], "vocab": logits.shape[1]}, SAMPLE,
        lambda c: sample_triton(logits, params, context, num_logprobs=num_logprobs,
                                with_probabilities=with_probabilities, config=c),
        SampleConfig(), dtype=NAMES[logits.dtype])


def spec_accept_config(
    tuner: Tuner, draft_tokens: torch.Tensor, num_drafts: torch.Tensor, target_probs: torch.Tensor,
    draft_probs: torch.Tensor | None, seeds: torch.Tensor, positions: torch.Tensor,
) -> Choice:
    """Choose a SpecAcceptConfig for arguments as `spec_accept` takes them (validated)."""
    batch, places, vocab = target_probs.shape
    return tuner.choose(
        "spec_accept", {"batch": batch, "places": places, "vocab": vocab, "drawn": int(draft_probs is not None)},
        SPEC_ACCEPT,
        lambda c: spec_accept_triton(draft_tokens, num_drafts, target_probs, draft_probs, seeds, positions, config=c),
        SpecAcceptConfig(), dtype="fp32")


def nvfp4_pays(tuner: Tuner, x: torch.Tensor, dense: torch.Tensor, weight: NVFP4Tensor) -> Choice:
    """Say whether the NVFP4 product is faster than torch's on the `[N, K]` dense weight, at x's token count."""
    n, k = weight.shape
    return tuner.choose_option("nvfp4", {"m": x.numel() // k, "n": n, "k": k},
                               lambda: torch.nn.functional.linear(x, dense), lambda: nvfp4_linear_triton(x, weight))


def fp8_cache_pays(
    tuner: Tuner, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor,
    context_lens: torch.Tensor,
) -> Choice:
    """Say whether decoding from an FP8 copy of the cache is faster than from the cache itself."""
    k8, v8 = k_cache.to(torch.float8_e4m3fn), v_cache.to(torch.float8_e4m3fn)
    one = torch.ones((), device=q.device)
    shape = {"batch": block_table.shape[0], "heads": q.shape[1], "kv_heads": k_cache.shape[2], "d": q.shape[2],
             "longest": block_table.shape[1] * k_cache.shape[1]}
    scale = q.shape[2] ** -0.5
    return tuner.choose_option(
        "fp8_cache", shape,
        lambda: paged_attention_triton(q, k_cache, v_cache, block_table, context_lens, scale=scale, window=None),
        lambda: paged_attention_triton(q, k8, v8, block_table, context_lens, scale=scale, window=None, k_scale=one,
                                       v_scale=one))
