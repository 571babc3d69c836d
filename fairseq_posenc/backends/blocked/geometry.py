"""How a call is cut into blocks, and which pairs of a block may attend."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fairseq_posenc.backends.base import Mask
from fairseq_posenc.encodings.base import Terms

# What a pair that may not attend has added: absorbs any score, and three of them are still finite.
FORBIDDEN = -1e38
# By measurement: queries of a block, pairs of a block for each thread, and pairs of a head up to
# which all blocks are held for the backward pass.
QUERIES, PAIRS, PAIRS_GPU, HELD = 512, 2**19, 2**27, 512**2


class Chunk(NamedTuple):
    """Sentences and heads that are computed together."""

    batch: slice
    heads: slice


class Block(NamedTuple):
    """Queries of a chunk, and the keys that they may see, as far as a direction says."""

    queries: slice  # counted from the last one back
    keys: slice

    @property
    def corner(self) -> int:
        """The table row of the first query and key."""
        return int(self.queries.start + self.keys.start)


class Geometry(NamedTuple):
    """The sizes of a call and its masks.

    Attributes:
        batch: B.
        heads: H.
        tgt_len: T.
        src_len: S.
        tile: N, members of a tile where one side meets a table; 1 where none does.
        direction: see :class:`~fairseq_posenc.backends.base.Mask`.
        padding: what is added to the scores of each key, ``(B, padded_src)``, or None.
        pairs: what is added to the score of each pair, last query first, or None.
        first: the key of each sentence's first token, with the reset; else None.
        per_head: whether a table differs from head to head.
        block_pairs: how many pairs of queries and keys make a block.
    """

    batch: int
    heads: int
    tgt_len: int
    src_len: int
    tile: int
    direction: str
    padding: Tensor | None
    pairs: Tensor | None
    first: list[int] | None
    per_head: bool
    block_pairs: int

    @classmethod
    def of(cls, query: Tensor, src_len: int, mask: Mask, terms: Terms) -> Geometry:
        """Return the geometry of a call.

        Args:
            query: ``(B, H, T, D)``.
            src_len: S.
            mask: which keys a query may see.
            terms: what the encodings add to the scores.
        """
        batch, heads, tgt_len, _ = query.shape
        by_distance = terms._replace(pair_bias=None, first=None)
        tables = [x for x in by_distance if isinstance(x, Tensor)]
        tile = _tile(src_len) if any(table.dim() == 3 for table in tables) else 1
        queries, keys = -tgt_len % tile, -src_len % tile  # what is missing to whole tiles
        padding, pairs = mask.key_padding, mask.pairs
        if keys and padding is None:
            padding = torch.zeros(batch, src_len, dtype=torch.bool, device=query.device)
        return cls(
            batch,
            heads,
            tgt_len,
            src_len,
            tile,
            mask.direction,
            None if padding is None else _added(F.pad(padding, (0, keys), value=True)),
            None if pairs is None else _added(F.pad(pairs.flip(0), (0, keys, 0, queries))),
            # A GPU has to be waited for to say where.
            None if terms.first is None else _first(terms.first, batch),
            any(table.size(0) > 1 for table in tables),
            _pairs(query.device),
        )

    @property
    def padded_tgt(self) -> int:
        """T, or what it takes to fill tiles."""
        return -(-self.tgt_len // self.tile) * self.tile

    @property
    def padded_src(self) -> int:
        """S, or what it takes to fill tiles."""
        return -(-self.src_len // self.tile) * self.tile

    @property
    def rows(self) -> int:
        """Rows of a table, without those of the reset."""
        return self.padded_tgt + self.padded_src - 1

    @property
    def is_short(self) -> bool:
        """Whether a backward pass can do with blocks that are held, as plain attention does."""
        return self.tgt_len * self.src_len <= HELD

    def direction_rows(self, device: torch.device, kind: torch.dtype) -> Tensor | None:
        """Return what a direction adds at each distance, ``(rows,)``: it is a bias as well."""
        if self.direction == "both":
            return None
        rows = torch.arange(self.rows, device=device)
        here = self.src_len - 1
        forbidden = rows > here if self.direction == "lr" else rows < here
        return torch.zeros(self.rows, dtype=kind, device=device).masked_fill(forbidden, FORBIDDEN)

    def chunks(self) -> Iterator[Chunk]:
        """Yield sentences and heads to compute together."""
        sentences, heads, _ = self._sizes()
        for b in range(0, self.batch, sentences):
            for h in range(0, self.heads, heads):
                yield Chunk(
                    slice(b, min(b + sentences, self.batch)), slice(h, min(h + heads, self.heads))
                )

    def blocks(self) -> Iterator[Block]:
        """Yield all queries of a chunk, block by block."""
        _, _, queries = self._sizes()
        for start in range(0, self.padded_tgt, queries):
            end = min(start + queries, self.padded_tgt)
            low, high = 0, self.padded_src
            if self.direction == "lr":
                high = max(self.src_len - start, 1)
            elif self.direction == "rl":
                low = max(self.src_len - end, 0)
            low, high = low // self.tile * self.tile, -(-high // self.tile) * self.tile
            yield Block(slice(start, end), slice(low, high))

    def _sizes(self) -> tuple[int, int, int]:
        """Return sentences, heads and queries of a block."""
        queries = max(min(QUERIES, self.padded_tgt) // self.tile, 1) * self.tile
        heads = max(self.block_pairs // (queries * self.padded_src), 1)
        if heads < self.heads or self.per_head:
            return 1, min(heads, self.heads), queries
        return min(heads // self.heads, self.batch), self.heads, queries


def _tile(src_len: int) -> int:
    """Return N: few members, so that little is computed beside their band, but no tiny products."""
    return 16 if src_len < 128 else 64


def _pairs(device: torch.device) -> int:
    """Return the pairs of a block.

    On a CPU they should stay in the caches, and occupy all threads. A GPU needs work for all of its
    processors at once.
    """
    return PAIRS * torch.get_num_threads() if device.type == "cpu" else PAIRS_GPU


def _first(first: Tensor, batch: int) -> list[int]:
    """Return where each of B sentences begins, -1 for nowhere, given ``(B or 1, S)`` of bool."""
    positions = [-1] * first.size(0)
    for sentence, position in first.nonzero().tolist():
        positions[sentence] = position
    return positions if len(positions) == batch else positions * batch


def _added(forbidden: Tensor) -> Tensor:
    """Return what is added to scores where pairs are forbidden."""
    return torch.zeros(forbidden.shape, device=forbidden.device).masked_fill(forbidden, FORBIDDEN)
