"""Names of token blocks for the prefix cache: each block's hash covers all that came before it.

A hash finds a candidate; whether it is the same text is decided by comparing token ids, block by block (CachedBlock).
Extra keys, such as the salt that keeps the owners of API keys apart, are hashed and compared with the first block.
"""

import hashlib
from array import array
from collections.abc import Sequence
from typing import NamedTuple

_DIGEST_BYTES = 16


class CachedBlock(NamedTuple):
    """What a cached block holds: its own hash, its parent's (of the salt for the first one) and its token ids."""

    hash: bytes
    parent: bytes
    token_ids: tuple[int, ...]


def root_hash(salt: str) -> bytes:
    """Name the empty beginning of all texts that may share blocks."""
    return hashlib.blake2b(salt.encode(), digest_size=_DIGEST_BYTES, person=b"salt").digest()


class BlockChain:
    """The full blocks of one sequence, named as its tokens become known."""

    def __init__(self, salt: str, block_size: int) -> None:
        self.block_size = block_size
        self.blocks: list[CachedBlock] = []
        self._root = root_hash(salt)

    def extend(self, token_ids: Sequence[int]) -> list[CachedBlock]:
        """Name the blocks that `token_ids`, all of the sequence's, fill; returns them all."""
        while (end := (len(self.blocks) + 1) * self.block_size) <= len(token_ids):
            parent = self.blocks[-1].hash if self.blocks else self._root
            tokens = tuple(token_ids[end - self.block_size : end])
            digest = hashlib.blake2b(parent + array("q", tokens).tobytes(), digest_size=_DIGEST_BYTES).digest()
            self.blocks.append(CachedBlock(digest, parent, tokens))
        return self.blocks
