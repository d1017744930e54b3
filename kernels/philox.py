"""Counter-based random numbers: Philox 4x32-10 (Salmon et al., SC 2011), the same in kernels and in torch.

A draw is a function of seed, position, token and stream alone: the key is the seed's 64 bits, the counter (token // 4,
position's low and high 32 bits, stream), output word token % 4. So it is the same in any batch and on any device.
Tokens are drawn by an exponential race: the largest log(weight) - log(E), E = -log(1 - u), is token i with probability
proportional to its weight (the Gumbel trick; small u, which decide, keep their digits in fp32, unlike log(-log(u))).
"""

import torch

from kernels.dispatch import tl, triton

STREAM_SAMPLE, STREAM_ACCEPT, STREAM_RESIDUAL = 0, 1, 2
Number = int | torch.Tensor
_MASK = 0xFFFFFFFF


@triton.jit
def philox_words(seed, position, blocks, stream):
    """Return the four uint32 words of each token block, blocks int32."""
    zeros = blocks * 0
    low = position.to(tl.int32)
    high = (position >> 32).to(tl.int32)
    return tl.philox(seed, blocks, zeros + low, zeros + high, zeros + stream)


@triton.jit
def uniform_of(words):
    """Map uint32 words to fp32 in (0, 1)."""
    return tl.minimum((words.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.9999999403953552)


@triton.jit
def log_exponential(words):
    """Map uint32 words to the logarithms of exponential variables."""
    u = uniform_of(words)
    # Triton has no log1p: below 2^-6 a series gives -log(1 - u) to fp32's precision
    series = u * (1.0 + u * (0.5 + u * (0.3333333333 + u * (0.25 + u * 0.2))))
    return tl.log(tl.where(u < 0.015625, series, -tl.log(1.0 - u)))


@triton.jit
def race_of_block(seed, position, start, stream, BLOCK: tl.constexpr):
    """Return log(E) of tokens start..start + BLOCK - 1, start a multiple of 4."""
    w0, w1, w2, w3 = philox_words(seed, position, start // 4 + tl.arange(0, BLOCK // 4), stream)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3)).reshape(BLOCK)
    return log_exponential(words)


def philox(seed: Number, position: Number, blocks: torch.Tensor, stream: Number) -> torch.Tensor:
    """Return the words of token blocks.

    blocks: int64. seed, position: 64 bits, stream: 32 bits, each a number or an int64 tensor that broadcasts with
    blocks. Returns `[..., 4]` int64 in 0..2^32 - 1.
    """
    k0, k1 = seed & _MASK, seed >> 32 & _MASK
    keys = [k0] if isinstance(k0, torch.Tensor) else []
    c0, c1, c2, c3, *_ = torch.broadcast_tensors(*(torch.as_tensor(x & _MASK, dtype=torch.int64, device=blocks.device)
                                                   for x in (blocks, position, position >> 32, stream, *keys)))
    for _ in range(10):
        # int64 wraps as uint64 does, so the high half survives an arithmetic shift under the mask
        product0, product2 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0 = (product2 >> 32).bitwise_xor_(c1).bitwise_xor_(k0).bitwise_and_(_MASK)
        c2 = (product0 >> 32).bitwise_xor_(c3).bitwise_xor_(k1).bitwise_and_(_MASK)
        # their high halves go under the next round's mask
        c1, c3 = product2, product0
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return torch.stack([c0, c1 & _MASK, c2, c3 & _MASK], -1)


def uniform(seed: Number, position: Number, tokens: torch.Tensor, stream: Number) -> torch.Tensor:
    """Return fp32 in (0, 1) for int64 tokens; the arguments broadcast as in `philox`."""
    words = philox(seed, position, tokens // 4, stream)
    return _uniform(words.gather(-1, (tokens % 4).expand(words.shape[:-1])[..., None]).squeeze(-1))


def race(seed: Number, position: Number, tokens: torch.Tensor, stream: Number) -> torch.Tensor:
    """Return log(E) in fp32 for int64 tokens; the arguments broadcast as in `philox`."""
    return _log_exponential(uniform(seed, position, tokens, stream))


def race_all(
    seed: Number, position: Number, vocab_size: int, stream: Number, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Return log(E) `[..., vocab_size]` in fp32 for all tokens, one Philox call for four of them.

    seed, position, stream: numbers, or `[..., 1]` int64 tensors.
    """
    words = philox(seed, position, torch.arange((vocab_size + 3) // 4, device=device), stream)
    return _log_exponential(_uniform(words.flatten(-2)[..., :vocab_size]))


def _uniform(words: torch.Tensor) -> torch.Tensor:
    return ((words.float() + 0.5) * 2.0**-32).clamp_(max=1 - 2.0**-24)


def _log_exponential(u: torch.Tensor) -> torch.Tensor:
    return torch.log1p(u.neg_()).neg_().log_()
