"""Divides a call into blocks: some sentences, heads and queries, and the keys that these may see.

For example, causal attention over 1,024 tokens may have two blocks for each head: the last 512
queries with all keys, and the first 512 queries with the first 512 keys. Queries are stored in
reverse, the last one first, so that query i' and key j have the distance i' + j, counted from the
call's lowest one.

Shapes: B batch, H heads, T queries, S keys.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from fairseq_posenc.backends.mask import Mask

# The sizes that were fastest in benchmarks.
MAX_QUERIES = 512  # the most queries of a block
PAIRS_PER_THREAD = 2**20  # pairs of a block on a CPU, for each thread of torch
PAIRS_ON_GPU = 2**27  # pairs of a block on a GPU
MIN_QUERIES = 64  # the fewest queries of a block where a window or segments hide most keys
KEYS_PER_QUERY = 8  # keys that a query sees there, on average, for each query of a block
FEW_QUERIES = 256  # the most queries of a block where a direction hides keys: fewer hide more
NEAR_QUERIES = 128  # the most where products with far rows are part of the content
MAX_NEAR = 0.75  # the largest share of all keys that are near ones

# The first and the last key that each of T queries sees.
Ranges = tuple[Sequence[int], Sequence[int]]


@dataclass(frozen=True)
class Block:
    """Some sentences, heads and queries of a call, with a range of keys.

    >>> keys = slice(0, 3)
    >>> block = Block(slice(0, 1), slice(0, 2), queries=slice(2, 4), keys=keys, near=keys)
    >>> block.select(torch.arange(10, 16), "R")  # of the distances of queries 2, 3 to keys 0, 1, 2
    tensor([12, 13, 14, 15])
    """

    sentences: slice
    heads: slice
    queries: slice  # counted from the last one back
    keys: slice
    near: slice  # those of the keys before and after which all pairs share a row of each table

    @cached_property
    def _places(self) -> dict[str, slice]:
        """The places by the letters of :meth:`select`."""
        first, last = self.queries.start, self.queries.stop - 1
        return {
            **{"B": self.sentences, "H": self.heads, "T": self.queries, "S": self.keys},
            "R": slice(first + self.keys.start, last + self.keys.stop),
            "b": slice(self.keys.start, self.near.start),
            "n": self.near,
            "a": slice(self.near.stop, self.keys.stop),
            "r": slice(first + self.near.start, last + self.near.stop),
        }

    def count_pairs(self, keys: slice) -> int:
        """Count the pairs of its queries with some keys, of all its sentences and heads."""
        places = self.sentences, self.heads, self.queries, keys
        return math.prod(place.stop - place.start for place in places)

    def select(self, x: Tensor, axes: str) -> Tensor:
        """Select this block of a tensor, as a view.

        Args:
            x: a dimension of size 1 is for all alike.
            axes: a letter for each dimension: B, H, T and S as above, R distances; n near keys, r
                the distances of these, b and a keys before and after them; others are taken whole.
        """
        places = (self._places.get(axis, slice(None)) for axis in axes)
        return x[tuple(y if n > 1 else slice(None) for y, n in zip(places, x.shape))]


class Geometry(NamedTuple):
    """The sizes of a call, which decide its blocks."""

    batch: int  # B
    heads: int  # H
    tgt_len: int  # T
    src_len: int  # S
    tile: int  # T and S are padded to multiples of it, and blocks begin and end with them
    per_head: bool  # whether tables differ by head; a block has one sentence, as tiles stack them
    pairs_of_block: int  # about how many pairs of queries and keys make a block
    near: tuple[int, int] | None = None  # see `find_near`

    @property
    def missing(self) -> tuple[int, int]:
        """The numbers of queries and keys that would fill the last tiles."""
        return -self.tgt_len % self.tile, -self.src_len % self.tile

    @property
    def padded(self) -> tuple[int, int]:
        """T and S, padded to whole tiles."""
        return self.tgt_len + self.missing[0], self.src_len + self.missing[1]

    @property
    def all_pairs(self) -> int:
        """The number of pairs, hidden ones and padding included."""
        return self.batch * self.heads * self.padded[0] * self.padded[1]

    def distances(self, device: torch.device) -> Tensor:
        """List the distances of padded queries and keys, ``(R,)``, in the order of table rows."""
        return torch.arange(sum(self.padded) - 1, device=device) - (self.src_len - 1)

    def _find_near(self, queries: slice, keys: slice) -> slice:
        """Find the keys beyond which all distances share a row, on either side; at least one."""
        if self.near is None:
            return keys
        # Key j is at i' + j - (S - 1) from query i': far from all before `low`, or from `high` on.
        low = self.near[0] + self.src_len - queries.stop
        high = self.near[1] + self.src_len - 1 - queries.start
        first = min(max(low, keys.start), keys.stop - 1)
        return slice(first, max(min(high, keys.stop), first + 1))

    def split(self, mask: Mask, device: torch.device) -> list[Block]:
        """List the blocks that hold all visible pairs of a call."""
        groups = _find_ranges(mask, self.tgt_len, self.src_len, device)
        blocks = []
        for index, ranges in enumerate(groups):
            begin, end = (index, index + 1) if len(groups) > 1 else (0, self.batch)
            sentences, heads, queries = self._choose_sizes(end - begin, ranges, mask)
            places = []
            for start in range(0, self.padded[0], queries):
                of_queries = slice(start, min(start + queries, self.padded[0]))
                keys = self._find_keys(of_queries, ranges)
                places.append((of_queries, keys, self._find_near(of_queries, keys)))
            for b in range(begin, end, sentences):
                of_sentences = slice(b, min(b + sentences, end))
                for h in range(0, self.heads, heads):
                    of_heads = slice(h, min(h + heads, self.heads))
                    blocks += [Block(of_sentences, of_heads, *place) for place in places]
        return blocks

    def _choose_sizes(self, batch: int, ranges: Ranges, mask: Mask) -> tuple[int, int, int]:
        """Choose how many sentences, heads and queries a block has, given its batch's ranges."""
        tgt_len, keys = self.padded
        queries = min(NEAR_QUERIES if self.near else MAX_QUERIES, tgt_len)
        if mask.locality.limits and mask.locality.first_keys is None:
            # A block has the keys of all its queries: the fewer queries, the fewer hidden pairs.
            widths = [last - first + 1 for first, last in zip(*ranges)]
            queries = min(queries, max(sum(widths) // len(widths) // KEYS_PER_QUERY, MIN_QUERIES))
            keys = min(keys, max(widths) + queries)
        elif mask.direction != "both":
            queries = min(queries, FEW_QUERIES)
        queries = max(queries // self.tile, 1) * self.tile
        fitting_heads = max(self.pairs_of_block // (queries * keys), 1)  # of all sentences together
        if fitting_heads < self.heads or self.per_head:
            return 1, min(fitting_heads, self.heads), queries
        return min(fitting_heads // self.heads, batch), self.heads, queries

    def _find_keys(self, place: slice, ranges: Ranges) -> slice:
        """Find the keys that some of the queries at a place see, in whole tiles."""
        # The same queries from the front; padding makes `stop` greater than T in the last tile.
        queries = slice(max(self.tgt_len - place.stop, 0), self.tgt_len - place.start)
        first, last = min(ranges[0][queries]), max(ranges[1][queries])
        return slice(first // self.tile * self.tile, -(-(last + 1) // self.tile) * self.tile)


def find_near(starts: Sequence[Sequence[int]], src_len: int) -> tuple[int, int] | None:
    """Find the distances between which tables have different rows, if there are many others.

    Args:
        starts: of each table with shared rows, the first distance of each row but the first.
        src_len: S.

    Returns:
        The first distance of the second row, and that of the last row, of all tables together.
    """
    low = min((x[0] for x in starts if x), default=0)
    high = max((x[-1] for x in starts if x), default=0)
    few = high - low + MAX_QUERIES <= MAX_NEAR * src_len
    return (low, high) if few and any(starts) else None


def _find_ranges(mask: Mask, tgt_len: int, src_len: int, device: torch.device) -> list[Ranges]:
    """Find the keys that each query may see, for all sentences together or for each of them."""
    if mask.locality.limits:
        if mask.locality.segments is None:
            # A window depends on lengths alone: computed on the CPU, it does not wait for a GPU.
            device = torch.device("cpu")
        found = mask.find_visible_ranges(tgt_len, src_len, device)
        if found is not None:
            numbers = torch.stack(found).cpu()  # [2, B or 1, T]
            if bool((numbers == numbers[:, :1]).all()):  # all sentences share their blocks
                numbers = numbers[:, :1]
            return [(first, last) for first, last in numbers.transpose(0, 1).tolist()]
    # Without limits, with first keys, or with segments in another order: by the direction alone.
    queries = range(src_len - tgt_len, src_len)
    first = queries if mask.direction == "rl" else [0] * tgt_len
    last = queries if mask.direction == "lr" else [src_len - 1] * tgt_len
    return [(first, last)]
