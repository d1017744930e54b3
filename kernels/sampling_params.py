"""What sampling takes and gives for a batch, and the rules it must keep."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernels.dispatch import require, triton

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
INT_TYPES = (torch.int32, torch.int64)
MAX_LOGPROBS = 32
MAX_VOCAB = 2**24 - 1  # tokens are counted in fp32


@dataclass(frozen=True)
class SamplingParams:
    """Hold how rows are drawn, each `[B]` on the logits' device; None leaves the step out for all rows.

    temperature: fp32, at least 0, 0 for the best token. seeds, positions: int64, what a draw depends on.
    top_k: int32, at least 1. top_p: fp32, above 0, at most 1. min_p: fp32, 0 to below 1.
    repetition_penalty: fp32, above 0. presence_penalty, frequency_penalty: fp32.
    """

    temperature: torch.Tensor
    seeds: torch.Tensor
    positions: torch.Tensor
    top_k: torch.Tensor | None = None
    top_p: torch.Tensor | None = None
    min_p: torch.Tensor | None = None
    repetition_penalty: torch.Tensor | None = None
    presence_penalty: torch.Tensor | None = None
    frequency_penalty: torch.Tensor | None = None


@dataclass(frozen=True)
class SamplingContext:
    """Hold what the rows have seen and may draw.

    prompt_counts, output_counts: `[B, V]` int32, how often each token occurs in the prompt and in the answer so far
    (`count_tokens`). bias: `[B, V]` fp32, added to the logits. allowed: `[B, ceil(V / 32)]` int32, one bit a token, the
    lowest first, as grammars give it.
    """

    prompt_counts: torch.Tensor | None = None
    output_counts: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    allowed: torch.Tensor | None = None


@dataclass(frozen=True)
class Sampled:
    """Hold the tokens: token_ids `[B]` int64; is_valid `[B]` bool, False where a logit is not finite or none is left.

    logprobs: `[B]` fp32, of the drawn token under the logits as they came. top_token_ids `[B, n]` int64 and
    top_logprobs `[B, n]` fp32, the best first, the lower id of equals. probabilities: `[B, V]` fp32, what was drawn
    from. The last four only where asked for.
    """

    token_ids: torch.Tensor
    is_valid: torch.Tensor
    logprobs: torch.Tensor | None = None
    top_token_ids: torch.Tensor | None = None
    top_logprobs: torch.Tensor | None = None
    probabilities: torch.Tensor | None = None


def count_tokens(token_ids: torch.Tensor, lengths: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Count tokens: `[B, L]` ids, of which the first lengths `[B]` of each row count, to `[B, V]` int32.

    Both int32 or int64. Raises ValueError for shapes, types, devices, or (on CPU) ids outside 0..V - 1.
    """
    op = "count_tokens"
    require(token_ids.ndim == 2 and lengths.shape == token_ids.shape[:1], op,
            "token_ids must be [B, L] and lengths [B]", (list(token_ids.shape), list(lengths.shape)))
    require(token_ids.dtype in INT_TYPES and lengths.dtype in INT_TYPES, op,
            "token_ids and lengths must be int32 or int64", (token_ids.dtype, lengths.dtype))
    require(lengths.device == token_ids.device, op, f"lengths must be on {token_ids.device} like token_ids",
            lengths.device)
    require(1 <= vocab_size <= MAX_VOCAB, op, f"vocab_size must be in 1..{MAX_VOCAB}", vocab_size)
    is_token = torch.arange(token_ids.shape[1], device=token_ids.device) < lengths[:, None]
    if token_ids.device.type == "cpu":
        bad = token_ids[is_token & ((token_ids < 0) | (token_ids >= vocab_size))]
        require(bad.numel() == 0, op, f"token_ids must be in 0..{vocab_size - 1}", bad[:4].tolist())
    counts = torch.zeros(token_ids.shape[0], vocab_size + 1, dtype=torch.int32, device=token_ids.device)
    ids = torch.where(is_token, token_ids, vocab_size).long()
    counts.scatter_add_(1, ids, torch.ones_like(ids, dtype=torch.int32))
    return counts[:, :vocab_size].contiguous()


def check_params(params: SamplingParams) -> None:
    """Read the values on the host and refuse bad ones with a ValueError."""
    rules: tuple[tuple[str, str, Callable[[torch.Tensor], torch.Tensor]], ...] = (
             ("temperature", "at least 0", lambda x: x >= 0), ("top_k", "at least 1", lambda x: x >= 1),
             ("top_p", "above 0, at most 1", lambda x: (x > 0) & (x <= 1)),
             ("min_p", "0 to below 1", lambda x: (x >= 0) & (x < 1)),
             ("repetition_penalty", "above 0 and finite", lambda x: (x > 0) & x.isfinite()),
             ("presence_penalty", "finite", torch.isfinite), ("frequency_penalty", "finite", torch.isfinite))
    for name, rule, is_good in rules:
        values = getattr(params, name)
        if values is not None:
            bad = values[~is_good(values)]
            require(bad.numel() == 0, "sample", f"{name} must be {rule}", bad[:4].tolist())


def validate(
    logits: torch.Tensor, params: SamplingParams, context: SamplingContext, num_logprobs: int | None
) -> None:
    """Raise ValueError unless shapes, types, strides and devices fit."""
    op = "sample"
    require(logits.ndim == 2 and 0 < logits.shape[1] <= MAX_VOCAB, op,
            f"logits must be [B, V] with V in 1..{MAX_VOCAB}", list(logits.shape))
    require(logits.dtype in DTYPES, op, "logits must be fp16, bf16 or fp32", logits.dtype)
    require(logits.stride(1) == 1 or logits.shape[1] == 1, op, "logits' last stride must be 1", logits.stride())
    batch, vocab = logits.shape
    for name, dtype in (("temperature", torch.float32), ("seeds", torch.int64), ("positions", torch.int64),
                        ("top_k", torch.int32), ("top_p", torch.float32), ("min_p", torch.float32),
                        ("repetition_penalty", torch.float32), ("presence_penalty", torch.float32),
                        ("frequency_penalty", torch.float32)):
        check_tensor(op, name, getattr(params, name), (batch,), dtype, logits.device)
    for name, shape, dtype in (("prompt_counts", (batch, vocab), torch.int32),
                               ("output_counts", (batch, vocab), torch.int32), ("bias", (batch, vocab), torch.float32),
                               ("allowed", (batch, triton.cdiv(vocab, 32)), torch.int32)):
        check_tensor(op, name, getattr(context, name), shape, dtype, logits.device)
    require(params.repetition_penalty is None or context.prompt_counts is not None
            or context.output_counts is not None, op, "repetition_penalty must come with counts", "none")
    is_additive = params.presence_penalty is not None or params.frequency_penalty is not None
    require(not is_additive or context.output_counts is not None, op,
            "presence_penalty and frequency_penalty must come with output_counts", "none")
    require(num_logprobs is None or 0 <= num_logprobs <= min(MAX_LOGPROBS, vocab), op,
            f"num_logprobs must be in 0..{min(MAX_LOGPROBS, vocab)} or None", num_logprobs)


def check_tensor(
    op: str, name: str, x: torch.Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    """Raise ValueError unless x is None or has this shape, type and device."""
    if x is not None:
        require(x.shape == shape and x.dtype == dtype, op, f"{name} must be {list(shape)} {dtype}",
                (list(x.shape), x.dtype))
        require(x.stride(-1) == 1 or shape[-1] <= 1, op, f"{name}'s last stride must be 1", x.stride())
        require(x.device == device, op, f"{name} must be on {device} like the first argument", x.device)
