"""Paged attention and the stores before it on a CPU, planned once for all the layers that share their pages.

Which rows are whose, which pages hold what they see and who is masked is the same in every layer of a step: it is
checked and turned into spans of the cache once, and a layer then costs its arithmetic. Caches come head by head,
`[Hkv, T, D]` with T = pages * page. Pages that follow one another are read where they are, others are joined.
What is computed is `kernels.paged_attention`'s, which is the reference; weights are not rounded to q's type.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F

from kernels.dispatch import require
from kernels.paged_torch import PAGE_SIZES

OP = "paged_plan"


@dataclass(frozen=True)
class Span:
    """One sequence of a step: `num_rows` rows from `row` on, its last tokens, which end at place `end` of its text.

    runs: (first place in the cache, count) of its tokens from `first` on, what its first row sees and all behind.
    """

    row: int
    num_rows: int
    first: int
    end: int
    window: int | None
    runs: tuple[tuple[int, int], ...]

    @property
    def is_causal(self) -> bool:
        """Whether a causal mask without an offset says who sees what."""
        return self.num_rows == self.end and self.window is None

    @cached_property
    def mask(self) -> torch.Tensor:
        """Say what each row sees: `[num_rows, end - first]` fp32, 0 or minus infinity."""
        keys = torch.arange(self.first, self.end)
        places = torch.arange(self.end - self.num_rows, self.end)[:, None]
        is_seen = keys <= places
        if self.window is not None:
            is_seen &= keys > places - self.window
        return torch.zeros(is_seen.shape).masked_fill_(~is_seen, float("-inf"))

    def seen_by(self, index: int) -> tuple[int, int]:
        """Give begin and end, counted from `first`, of what one of the rows sees."""
        end = self.end - self.num_rows + index + 1
        begin = self.first if self.window is None else max(self.first, end - self.window)
        return begin - self.first, end - self.first


class PagedPlan:
    """A step's pages for all layers that have one window."""

    def __init__(
        self,
        tables: Sequence[Sequence[int]],
        starts: Sequence[int],
        lengths: Sequence[int],
        *,
        page: int,
        num_pages: int,
        window: int | None = None,
        num_padding: int = 0,
        is_by_row: bool = False,
    ) -> None:
        """Plan a step of B sequences.

        Args:
            tables: page ids of each sequence, read from the first that is seen on.
            starts: tokens of each that came before; lengths: its new tokens, at least 1 each, the rows of the batch.
            num_padding: rows behind all sequences that are nobody's: they store nothing and get zeros.
            is_by_row: let each row attend alone, so that its bits do not depend on the rows beside it.

        Raises:
            ValueError: a page is not in the cache, or a table ends before its text.
        """
        require(page in PAGE_SIZES, OP, f"page must be one of {PAGE_SIZES}", page)
        require(window is None or window >= 1, OP, "window must be at least 1 or None", window)
        self.num_rows = sum(lengths)
        self.num_padding = num_padding
        self.num_places = num_pages * page
        self.is_by_row = is_by_row
        self.spans: list[Span] = []
        self._checked: set[tuple[object, ...]] = set()
        slots: list[int] = []
        for table, start, length in zip(tables, starts, lengths, strict=True):
            require(start >= 0 and length >= 1, OP, "starts must be at least 0 and lengths at least 1", (start, length))
            end = start + length
            first = 0 if window is None else max(0, start + 1 - window)
            pages = table[first // page : -(-end // page)]
            require(len(pages) == -(-end // page) - first // page, OP, f"a table must reach token {end}", len(table))
            require(min(pages) >= 0 and max(pages) < num_pages, OP, f"page ids must be in 0..{num_pages - 1}",
                    (min(pages), max(pages)))
            self.spans.append(Span(len(slots), length, first, end, window, _runs(pages, page, first, end)))
            slots += [table[place // page] * page + place % page for place in range(start, end)]
        self._first_slot = slots[0] if slots and slots == list(range(slots[0], slots[0] + len(slots))) else None
        self._slots = torch.tensor(slots, dtype=torch.int64)

    def store(self, k: torch.Tensor, v: torch.Tensor | None, keys: torch.Tensor, values: torch.Tensor | None) -> None:
        """Write the rows' keys and values to their places.

        k: `[N, Hkv, D]`, v: `[N, Hkv, Dv]`. keys: `[Hkv, T, D]`, values: `[Hkv, T, Dv]`, both of k's type. v and values
        are None where one latent is both. Raises ValueError for shapes or types that do not fit.
        """
        for x, cache in ((k, keys), (v, values)):
            if x is None or cache is None:
                require(x is None and cache is None, OP, "v and values must be given together", "one of them")
                continue
            signature = (x.shape, x.dtype, cache.shape, cache.dtype)
            if signature not in self._checked:
                wanted = (cache.shape[0], self.num_places, x.shape[2])
                require(x.shape[:2] == (self.num_rows + self.num_padding, cache.shape[0]) and cache.shape == wanted, OP,
                        f"rows must be [{self.num_rows + self.num_padding}, Hkv, D] and a cache "
                        f"[Hkv, {self.num_places}, D]", (list(x.shape), list(cache.shape)))
                require(x.dtype == cache.dtype, OP, f"rows must be {cache.dtype} like the cache", x.dtype)
                self._checked.add(signature)
            rows = x.transpose(0, 1)
            if self.num_padding:
                rows = rows[:, : self.num_rows]
            if self._first_slot is not None:
                cache.narrow(1, self._first_slot, self.num_rows).copy_(rows)
            else:
                cache.index_copy_(1, self._slots, rows)

    def attend(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        scale: float,
        sinks: torch.Tensor | None = None,
        soft_cap: float | None = None,
    ) -> torch.Tensor:
        """Let each row attend to what it sees of its sequence.

        q: `[N, H, D]`, H a multiple of Hkv. keys: `[Hkv, T, D]`, values: `[Hkv, T, Dv]`. sinks: `[H]` fp32.
        Returns `[N, H, Dv]`. Raises ValueError for shapes or types that do not fit.
        """
        # layers of a model are alike: the first of a kind is checked
        signature = (q.shape, q.dtype, keys.shape, keys.dtype, values.shape, values.dtype, soft_cap,
                     None if sinks is None else sinks.shape)
        if signature not in self._checked:
            self._check(q, keys, values, sinks, soft_cap)
            self._checked.add(signature)
        queries = q.unflatten(1, (keys.shape[0], -1)).permute(1, 2, 0, 3)  # [Hkv, group, N, D]
        is_plain = sinks is not None or soft_cap is not None
        parts = []
        for span in self.spans:
            k, v = _read(keys, span.runs), _read(values, span.runs)
            rows = queries.narrow(2, span.row, span.num_rows)
            if span.num_rows == 1 or self.is_by_row:
                for index in range(span.num_rows):
                    row, begin, end = rows, 0, span.end - span.first
                    if span.num_rows > 1:
                        row = rows.narrow(2, index, 1)
                        begin, end = span.seen_by(index)
                    seen = k.narrow(1, begin, end - begin), v.narrow(1, begin, end - begin)
                    if is_plain:
                        parts.append(_attend_plainly(row, *seen, None, scale, sinks, soft_cap))
                    else:
                        parts.append(_attend_one(row, *seen, scale))
            elif is_plain:
                parts.append(_attend_plainly(rows, k, v, span.mask, scale, sinks, soft_cap))
            else:
                parts.append(_attend_many(rows, k, v, span, scale))
        if self.num_padding:
            parts.append(q.new_zeros(self.num_padding, q.shape[1], values.shape[2]))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _check(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        sinks: torch.Tensor | None,
        soft_cap: float | None,
    ) -> None:
        num_rows = self.num_rows + self.num_padding
        require(q.ndim == 3 and q.shape[0] == num_rows, OP, f"q must be [{num_rows}, H, D]", list(q.shape))
        require(keys.ndim == 3 and keys.shape[1:] == (self.num_places, q.shape[2]), OP,
                f"keys must be [Hkv, {self.num_places}, {q.shape[2]}]", list(keys.shape))
        require(values.ndim == 3 and values.shape[:2] == keys.shape[:2], OP,
                f"values must be [{keys.shape[0]}, {self.num_places}, Dv]", list(values.shape))
        require(q.shape[1] % keys.shape[0] == 0, OP, "heads must be a multiple of the cache's",
                (q.shape[1], keys.shape[0]))
        require(q.dtype == keys.dtype == values.dtype, OP, f"keys and values must be {q.dtype} like q",
                (keys.dtype, values.dtype))
        require(sinks is None or sinks.shape == q.shape[1:2], OP, f"sinks must be [{q.shape[1]}]",
                None if sinks is None else list(sinks.shape))
        require(soft_cap is None or soft_cap > 0, OP, "soft_cap must be above 0 or None", soft_cap)


def _runs(pages: Sequence[int], page: int, first: int, end: int) -> tuple[tuple[int, int], ...]:
    """Join pages that follow one another: (first place, count) of each run, cut to tokens first to end."""
    runs: list[tuple[int, int]] = []
    ends = [index for index, (a, b) in enumerate(itertools.pairwise(pages), 1) if b != a + 1]
    for begin, stop in itertools.pairwise([0, *ends, len(pages)]):
        skipped = first % page if begin == 0 else 0
        past = (first // page + len(pages)) * page - end if stop == len(pages) else 0
        runs.append((pages[begin] * page + skipped, (stop - begin) * page - skipped - past))
    return tuple(runs)


def _read(cache: torch.Tensor, runs: tuple[tuple[int, int], ...]) -> torch.Tensor:
    """Give a sequence's keys or values, `[Hkv, T, D]`: a view where they are one run."""
    if len(runs) == 1:
        return cache.narrow(1, *runs[0])
    return torch.cat([cache.narrow(1, *run) for run in runs], 1)


def _attend_one(row: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Attend from one token, `[Hkv, group, 1, D]`, to all keys `[Hkv, T, D]`; gives `[1, H, Dv]`."""
    # the heads of a group are rows of one matrix
    attended = F.scaled_dot_product_attention(row.transpose(1, 2), k.unsqueeze(1), v.unsqueeze(1), scale=scale)
    return attended.flatten(0, 2).unsqueeze(0)


def _attend_many(rows: torch.Tensor, k: torch.Tensor, v: torch.Tensor, span: Span, scale: float) -> torch.Tensor:
    """Attend from `[Hkv, group, n, D]`; gives `[n, H, Dv]`."""
    group = rows.shape[1]
    k, v = (x.unsqueeze(1).expand(-1, group, -1, -1) for x in (k, v))
    mask = None if span.is_causal else span.mask.to(rows.dtype)
    attended = F.scaled_dot_product_attention(rows, k, v, mask, is_causal=span.is_causal, scale=scale)
    return attended.permute(2, 0, 1, 3).flatten(1, 2)


def _attend_plainly(
    rows: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    sinks: torch.Tensor | None,
    soft_cap: float | None,
) -> torch.Tensor:
    """Attend with a soft cap or sinks, which torch's own attention does not know, in fp32; gives `[n, H, Dv]`."""
    scores = rows.float() @ k.float().transpose(1, 2).unsqueeze(1) * scale
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    if mask is not None:
        scores = scores + mask
    if sinks is not None:
        sink = sinks.float().view(rows.shape[0], -1, 1, 1).expand(-1, -1, rows.shape[2], -1)
        scores = torch.cat([scores, sink], -1)
    weights = torch.softmax(scores, -1)[..., : k.shape[1]]
    attended = weights @ v.float().unsqueeze(1)
    return attended.permute(2, 0, 1, 3).flatten(1, 2).to(rows.dtype)
