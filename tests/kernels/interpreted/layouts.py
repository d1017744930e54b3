"""The same values in other places: layouts that callers have, for the examples that hypothesis draws."""

import torch
from hypothesis import strategies as st

LAYOUTS = ("whole", "token-major", "batch last", "gaps", "shared")
layouts = st.sampled_from(LAYOUTS)


def laid_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    """Lay out `[B, H, N, D]`: last stride 1, NaN in every place of its memory that is none of its own.

    "shared" has the first head's values in all heads, with a stride of zero; the others change no value.
    """
    if layout == "token-major":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "batch last":
        return x.permute(2, 1, 0, 3).contiguous().permute(2, 1, 0, 3)
    if layout == "gaps":
        batch, heads, n, d = x.shape
        room = torch.full((batch + 1, heads, 2 * n + 1, d + 8), float("nan"), dtype=x.dtype)
        place = room[1:, :, 1::2, 4 : d + 4]
        return place.copy_(x)
    return x[:, :1].expand_as(x) if layout == "shared" else x
