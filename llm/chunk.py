"""New tokens of one sequence in a step, and how steps are cut into tiles of rows."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from llm.kv_cache import SequenceBlocks


class Chunk(NamedTuple):
    """New tokens of one sequence, the number that came before them, its blocks, and whether its logits are wanted.

    `fed_row`: the last token is not in `token_ids`; it is that row of the tokens that the step before has drawn.
    """

    token_ids: Sequence[int]
    past: int
    blocks: SequenceBlocks
    wants_logits: bool
    fed_row: int | None = None

    @property
    def length(self) -> int:
        """New tokens, the one that is fed included."""
        return len(self.token_ids) + (self.fed_row is not None)

    def split(self, count: int) -> tuple["Chunk", "Chunk"]:
        """Cut behind the first `count` tokens, at least one and not all; logits come from the second part."""
        assert 0 < count < self.length, f"{count} of {self.length} tokens"
        head = Chunk(self.token_ids[:count], self.past, self.blocks, wants_logits=False)
        return head, self._replace(token_ids=self.token_ids[count:], past=self.past + count)


def tiles(chunks: Sequence[Chunk], num_rows: int) -> Iterator[list[Chunk]]:
    """Cut a step into parts of at most `num_rows` tokens, in order: later ones see what earlier ones have stored."""
    tile: list[Chunk] = []
    room = num_rows
    for chunk in chunks:
        rest = chunk
        while rest.length > room:
            if room:
                head, rest = rest.split(room)
                tile.append(head)
            yield tile
            tile, room = [], num_rows
        tile.append(rest)
        room -= rest.length
    if tile:
        yield tile
