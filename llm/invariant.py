"""Invariant mode: a token's logits have the same bits alone, in any batch, in any chunk, behind any cached beginning.

What would make them differ, and what is done (Thinking Machines, "Defeating nondeterminism in LLM inference", 2025):
- Matrix products choose another kernel by their number of rows. MKL's fp32 product on AVX2 (torch 2.11, EPYC, all
  layer shapes of SmolLM2 and of the tiny test models, tried 2026-11) gives a row the same bits for every number of rows
  from 4 on, wherever the row stands; with 1, 2 or 3 rows it sums in another order (bf16 by oneDNN: the same from 1 on).
  So a CPU's step is padded to a multiple of 4 rows. On a GPU the kernel may change at any number of rows: a step is run
  in tiles of exactly 64. The rows whose logits are wanted are padded likewise.
- Elementwise functions treat the end of an array, what does not fill its vectors, by other code. 4 rows of a width that
  4 divides leave none.
- Attention splits keys by the number of queries: each row attends alone, on a GPU in spans of fixed length.
- Experts get as many rows as chose them: each token is multiplied with its experts alone (transformers' `batched_mm`).
Its price, SmolLM2-135M in fp32 on one thread of an EPYC, 2026-12, CPU time of a step against the default's: 1.7 times
alone (four rows in place of one), 1.1 for four, 1.03 for sixteen; prompts 1.05 to 1.4 times.
Padding rows store nothing and are seen by nobody. The rest of the model's code works on rows; that it all holds, for
this model on this device, is checked when the model is loaded, and a model for which it does not is refused.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class InvariantRows:
    """How a step is padded: to a multiple of `multiple` rows, and cut into tiles of `tile` rows, None for one tile."""

    multiple: int
    tile: int | None = None

    def num_padding(self, num_rows: int) -> int:
        """Rows to add to so many."""
        return -num_rows % self.multiple


# tried in order until one gives the same bits: the fewest rows that will do, see above, then tiles that any library
# must treat alike
CPU_ROWS = (InvariantRows(4), InvariantRows(16, 16))
GPU_ROWS = (InvariantRows(64, 64),)
# the experts' implementation that multiplies each token alone
EXPERTS = "batched_mm"


def rows_for(device: torch.device) -> tuple[InvariantRows, ...]:
    """Say how steps may be padded on a device, the cheapest first."""
    return CPU_ROWS if device.type == "cpu" else GPU_ROWS
