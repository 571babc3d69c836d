"""Divides a call into blocks: some sentences, heads and queries, and the keys that these may see.

For example, causal attention over 1,024 tokens may have two blocks for each head: the last 512
queries with all keys, and the first 512 queries with the first 512 keys. Queries are stored in
reverse, the last one first, so that query i' and key j have the distance i' + j, counted from the
call's lowest one.

Shapes: B batch, H heads, T queries, S keys.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
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
MIN_GAP = 128  # the fewest hidden keys between first keys and a window that are worth skipping
# Queries of a block beyond whose near keys all distances share a row, and the largest share of all
# keys that these near ones may be.
QUERIES_OF_SHARED_ROWS, MAX_NEAR = 256, 0.75


class Part(NamedTuple):
    """Pairs of some sentences and heads: a range of queries with a range of keys."""

    sentences: slice
    heads: slice
    queries: slice  # counted from the last one back
    keys: slice

    @property
    def distances(self) -> slice:
        """The distances of its pairs, counted from the call's lowest one."""
        low = self.queries.start + self.keys.start
        return slice(low, self.queries.stop + self.keys.stop - 1)

    @property
    def num_pairs(self) -> int:
        """The number of its pairs."""
        return math.prod(place.stop - place.start for place in self)

    def select(self, x: Tensor, axes: str) -> Tensor:
        """Select this part of a tensor, as a view.

        Args:
            x: a dimension of size 1 is for all alike.
            axes: a letter for each dimension: B, H, T and S as above, R distances; others are
                selected whole.
        """
        places = {"B": self.sentences, "H": self.heads, "T": self.queries, "S": self.keys}
        for dim, axis in enumerate(axes):
            if axis in "BHTSR" and x.size(dim) > 1:
                place = self.distances if axis == "R" else places[axis]
                if (size := place.stop - place.start) < x.size(dim):
                    x = x.narrow(dim, place.start, size)
        return x


# Parts with the same queries, which share a softmax.
Block = tuple[Part, ...]


# The first and the last key that each of T queries sees; first > last if it sees none.
Ranges = tuple[Sequence[int], Sequence[int]]


class Geometry(NamedTuple):
    """The sizes of a call, which decide its blocks."""

    batch: int  # B
    heads: int  # H
    tgt_len: int  # T
    src_len: int  # S
    tile: int  # queries or keys of a tile, with which ranges begin and end
    per_head: bool  # whether a table differs from head to head
    pairs_of_block: int  # about how many pairs of queries and keys make a block
    limited: bool  # whether a window or segments hide keys
    # The first distance of the second row of tables, and that of the last row; None if blocks are
    # not divided by them
    near: tuple[int, int] | None = None

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

    def has_one_row(self, part: Part) -> bool:
        """Check whether each table with shared rows has one row for all pairs of a part."""
        low, high = part.distances.start - self.src_len + 1, part.distances.stop - self.src_len
        return self.near is not None and (high < self.near[0] or low >= self.near[1])

    def distances(self, device: torch.device) -> Tensor:
        """List the distances of padded queries and keys, ``(R,)``, in the order of table rows."""
        return torch.arange(sum(self.padded) - 1, device=device) - (self.src_len - 1)

    def split(self, mask: Mask, device: torch.device) -> list[Block]:
        """List the blocks that hold all visible pairs of a call."""
        groups = _find_ranges(mask, self.tgt_len, self.src_len, device)
        blocks = []
        for index, ranges in enumerate(groups):
            begin, end = (index, index + 1) if len(groups) > 1 else (0, self.batch)
            sentences, heads, queries = self._choose_sizes(end - begin, ranges)
            starts = range(0, self.padded[0], queries)
            places = [slice(start, min(start + queries, self.padded[0])) for start in starts]
            rows = [(place, list(self._split_keys(place, ranges))) for place in places]
            for b in range(begin, end, sentences):
                of_sentences = slice(b, min(b + sentences, end))
                for h in range(0, self.heads, heads):
                    of_heads = slice(h, min(h + heads, self.heads))
                    blocks += [
                        tuple(Part(of_sentences, of_heads, at, part) for part in keys)
                        for at, keys in rows
                    ]
        return blocks

    def _choose_sizes(self, batch: int, ranges: list[Ranges]) -> tuple[int, int, int]:
        """Choose how many sentences, heads and queries a block has."""
        tgt_len, keys = self.padded
        queries = min(MAX_QUERIES, tgt_len)
        if self.limited:
            # A block has the keys of all its queries: the fewer queries, the fewer hidden pairs.
            widths = [last - first + 1 for first, last in zip(*ranges[0])]
            mean_width = sum(widths) // len(widths)
            queries = min(queries, max(mean_width // KEYS_PER_QUERY, MIN_QUERIES))
            keys = min(keys, max(widths) + queries)
        elif self.near is not None:
            queries = min(queries, QUERIES_OF_SHARED_ROWS)
        queries = max(queries // self.tile, 1) * self.tile
        fitting_heads = max(self.pairs_of_block // (queries * keys), 1)  # of all sentences together
        if fitting_heads < self.heads or self.per_head:
            return 1, min(fitting_heads, self.heads), queries
        return min(fitting_heads // self.heads, batch), self.heads, queries

    def _split_keys(self, place: slice, ranges: list[Ranges]) -> Iterator[slice]:
        """Yield the ranges of keys that the queries at a place see.

        The keys whose distances from all of the queries share one row of each table have ranges of
        their own.
        """
        # The same queries from the front; padding makes `stop` greater than T in the last tile.
        queries = slice(max(self.tgt_len - place.stop, 0), max(self.tgt_len - place.start, 1))
        found = [(min(first[queries]), max(last[queries]) + 1) for first, last in ranges]
        (low, high), *of_first_keys = found
        for begin, stop in of_first_keys:  # before the window, the window, after it
            found = [(begin, min(stop, low)), (low, high), (max(begin, high), stop)]
        joined: list[tuple[int, int]] = []
        for begin, stop in found:
            if begin < stop:
                begin, stop = begin // self.tile * self.tile, -(-stop // self.tile) * self.tile
                if joined and begin - joined[-1][1] < MIN_GAP:
                    begin, _ = joined.pop()
                joined.append((begin, stop))
        cuts = []
        if self.near is not None:
            low, high = self.near[0] + self.src_len, self.near[1] + self.src_len - 1
            cuts.append((low - place.stop) // self.tile * self.tile)
            cuts.append(-(-(high - place.start) // self.tile) * self.tile)
        for begin, stop in joined:
            for cut in cuts:
                if begin < cut < stop:
                    yield slice(begin, cut)
                    begin = cut
            yield slice(begin, stop)


def find_near(starts: Sequence[Sequence[int]], src_len: int) -> tuple[int, int] | None:
    """Find the distances between which tables have different rows, if there are many others.

    Args:
        starts: of each table with shared rows, the first distance of each row but the first.
        src_len: S.
    """
    low = min((x[0] for x in starts if x), default=0)
    high = max((x[-1] for x in starts if x), default=0)
    few = high - low + QUERIES_OF_SHARED_ROWS <= MAX_NEAR * src_len
    return (low, high) if starts and few else None


def _find_ranges(
    mask: Mask, tgt_len: int, src_len: int, device: torch.device
) -> list[list[Ranges]]:
    """Find the keys that each query may see, for all sentences together or for each of them.

    If there are first keys, which no window hides, their ranges follow those of the other keys.
    """
    limits = mask.locality
    if limits.segments is None and limits.first_keys is None:
        # A window depends on lengths alone: computed on the CPU, it does not wait for a GPU.
        device = torch.device("cpu")
    if limits.limits:
        found = [mask.without_first_keys.find_visible_ranges(tgt_len, src_len, device)]
        if limits.first_keys is not None:
            found.append(mask.find_first_key_ranges(tgt_len, src_len, device))
        ranges = [x for pair in found if pair is not None for x in pair]
        if ranges:
            sentences = max(len(x) for x in ranges)
            numbers = torch.stack([x.expand(sentences, -1) for x in ranges]).cpu()  # [n, B, T]
            if bool((numbers == numbers[:, :1]).all()):
                numbers = numbers[:, :1]
            return [
                list(zip(of_sentence[::2], of_sentence[1::2]))
                for of_sentence in numbers.transpose(0, 1).tolist()
            ]
    # Without limits, or with segments that do not ascend, a direction alone leaves out keys.
    queries = range(src_len - tgt_len, src_len)
    first = queries if mask.direction == "rl" else [0] * tgt_len
    last = queries if mask.direction == "lr" else [src_len - 1] * tgt_len
    return [[(first, last)]]
