"""Divides a call into blocks: some sentences, heads and queries, and the keys that these may see.

For example, causal attention over 1,024 tokens may have two blocks for each head: the last 512
queries with all keys, and the first 512 queries with the first 512 keys. Queries are stored in
reverse, the last one first, so that query i' and key j have the distance i' + j, counted from the
call's lowest one.

Shapes: B batch, H heads, T queries, S keys.
"""

from __future__ import annotations

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
    of_first: bool = False  # whether the only key is the first token, with rows of its own (reset)

    @property
    def distances(self) -> slice:
        """The distances of its pairs, counted from the call's lowest one."""
        low = self.queries.start + self.keys.start
        return slice(low, self.queries.stop + self.keys.stop - 1)

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


class Ranges(NamedTuple):
    """The first and the last key that each of T queries sees; first > last if it sees none."""

    first: Sequence[int]
    last: Sequence[int]


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

    def distances(self, device: torch.device) -> Tensor:
        """List the distances of padded queries and keys, ``(1, R)``, in the order of table rows."""
        return torch.arange(sum(self.padded) - 1, device=device)[None] - (self.src_len - 1)

    def query_positions(self, device: torch.device) -> Tensor:
        """List the indices of the padded queries among the keys, ``(T,)``; below 0 for padding."""
        return self.src_len - 1 - torch.arange(self.padded[0], device=device)

    def split(self, mask: Mask, device: torch.device) -> list[Block]:
        """List the blocks that hold all visible pairs of a call."""
        groups = _find_ranges(mask, self.tgt_len, self.src_len, device)
        blocks = []
        for index, ranges in enumerate(groups):
            begin, end = (index, index + 1) if len(groups) > 1 else (0, self.batch)
            sentences, heads, queries = self._choose_sizes(end - begin, ranges)
            rows = [
                (slice(start, end_query), keys)
                for start in range(0, self.padded[0], queries)
                for end_query in [min(start + queries, self.padded[0])]
                for keys in [list(self._split_keys(start, end_query, ranges))]
            ]
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

    def _split_keys(self, start: int, end: int, ranges: list[Ranges]) -> Iterator[slice]:
        """Yield the ranges of keys that the queries from ``start`` to before ``end`` see."""
        # The same queries from the front; padding makes `end` greater than T in the last tile.
        queries = slice(max(self.tgt_len - end, 0), max(self.tgt_len - start, 1))
        found = [(min(x.first[queries]), max(x.last[queries]) + 1) for x in ranges]
        (low, high), *of_first_keys = found
        for begin, stop in of_first_keys:  # before the window, the window, after it
            found = [(begin, min(stop, low)), (low, high), (max(begin, high), stop)]
        parts: list[slice] = []
        for begin, stop in found:
            if begin >= stop:
                continue
            begin = begin // self.tile * self.tile
            stop = -(-stop // self.tile) * self.tile
            if parts and begin - parts[-1].stop < MIN_GAP:
                begin = parts.pop().start
            parts.append(slice(begin, stop))
        for part in parts:
            yield from self._cut_off_shared_rows(part, start, end)

    def _cut_off_shared_rows(self, keys: slice, start: int, end: int) -> Iterator[slice]:
        """Cut off the keys whose distances from all of the queries share one row of each table."""
        if self.near is None:
            yield keys
            return
        low = (self.near[0] + self.src_len - end) // self.tile * self.tile
        high = -(-(self.near[1] + self.src_len - 1 - start) // self.tile) * self.tile
        low, high = (min(max(x, keys.start), keys.stop) for x in (low, high))
        for begin, stop in ((keys.start, low), (low, high), (high, keys.stop)):
            if begin < stop:
                yield slice(begin, stop)


def find_neighbours(block: Block, index: int) -> Part | None:
    """Join a part with those that follow without a gap; None if it follows another one itself."""
    part = block[index]
    if index and not part.of_first and block[index - 1].keys.stop == part.keys.start:
        return None
    stop = part.keys.stop
    for other in block[index + 1 :]:
        if other.keys.start == stop and not other.of_first:
            stop = other.keys.stop
    return part._replace(keys=slice(part.keys.start, stop))


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
                [Ranges(*x) for x in zip(of_sentence[::2], of_sentence[1::2])]
                for of_sentence in numbers.transpose(0, 1).tolist()
            ]
    # Without limits, or with segments that do not ascend, a direction alone leaves out keys.
    queries = range(src_len - tgt_len, src_len)
    first = queries if mask.direction == "rl" else [0] * tgt_len
    last = queries if mask.direction == "lr" else [src_len - 1] * tgt_len
    return [[Ranges(first, last)]]
