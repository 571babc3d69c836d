"""Divides a call into blocks: some sentences, heads and queries, and the keys that these may see.

For example, causal attention over 1,024 tokens may have two blocks for each head: the last 512
queries with all keys, and the first 512 queries with the first 512 keys. Queries are stored in
reverse, the last one first, so that query i' and key j have the distance i' + j, counted from the
call's lowest one.

Shapes: B batch, H heads, T queries, S keys.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from fairseq_posenc.backends.base import AttentionCall
from fairseq_posenc.encodings.term import ByDistance
from fairseq_posenc.encodings.terms import Terms
from fairseq_posenc.mask import Mask

# The sizes that were fastest in benchmarks.
MAX_QUERIES = 512  # the most queries of a block
PAIRS_PER_THREAD = 2**19  # pairs of a block on a CPU, for each thread of torch
PAIRS_ON_GPU = 2**27  # pairs of a block on a GPU
MIN_QUERIES = 64  # the fewest queries of a block where a window or segments hide most keys
KEYS_PER_QUERY = 8  # there, a block has a query for every 8 keys that a query sees on average
FEW_QUERIES = 256  # the most queries of a block where a direction hides keys: fewer hide more
NEAR_QUERIES = 256  # the most in a block of a product with far keys: fewer have fewer near keys
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
    queries: slice  # counted back from the last one
    keys: slice
    near: slice  # part of the keys: before it, and after it, all pairs share a row of each table

    @cached_property
    def _places(self) -> dict[str, slice]:
        """The places by the letters of :meth:`select`."""
        first, last = self.queries.start, self.queries.stop - 1
        return {
            **{"B": self.sentences, "H": self.heads, "T": self.queries, "S": self.keys},
            "R": slice(first + self.keys.start, last + self.keys.stop),
            "r": slice(first + self.near.start, last + self.near.stop),
            **{"b": slice(self.keys.start, self.near.start), "n": self.near},
            "a": slice(self.near.stop, self.keys.stop),
        }

    def list_places(self, src_len: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """List the indices of queries, ``(M, 1)``, and of keys, ``(1, W)``, among all tokens."""
        queries = torch.arange(self.queries.start, self.queries.stop, device=device)
        keys = torch.arange(self.keys.start, self.keys.stop, device=device)
        return src_len - 1 - queries[:, None], keys[None]

    @property
    def widths(self) -> tuple[int, int, int]:
        """The numbers of keys before near ones, of these, and after them."""
        begin, end = self.near.start, self.near.stop
        return begin - self.keys.start, end - begin, self.keys.stop - end

    def select(self, x: Tensor, axes: str) -> Tensor:
        """Select this block of a tensor, as a view.

        Args:
            x: the tensor; a dimension of size 1 is kept whole, as it is for all.
            axes: a letter for each dimension: B, H, T and S as above, R distances, r those of near
                keys, n near keys, b those before and a those after them; others are taken whole.
        """
        whole, places = slice(None), self._places
        return x[tuple([places.get(y, whole) if n > 1 else whole for y, n in zip(axes, x.shape)])]

    def select_all(self, tensors: Iterable[Tensor | None], axes: Sequence[str]) -> list[Any]:
        """Select this block of tensors, as views; None stays."""
        return [None if x is None else self.select(x, y) for x, y in zip(tensors, axes)]


def split(call: AttentionCall, near: tuple[int, int] | None = None) -> list[Block]:
    """List the blocks that hold all visible pairs of a call; :func:`find_near` finds ``near``."""
    batch, heads, tgt_len, _ = call.query.shape
    src_len, device, mask = call.key.size(2), call.query.device, call.mask
    # With a table for each head, one sentence: `bands` views heads and sentences as one dimension.
    per_head = any(term.per_head for term in call.terms if isinstance(term, ByDistance))
    # On a CPU a block's pairs should stay in the caches, and occupy all threads. A GPU needs work
    # for all of its processors at once.
    pairs = PAIRS_PER_THREAD * torch.get_num_threads() if device.type == "cpu" else PAIRS_ON_GPU
    deps = (*mask.cache_deps, tgt_len, src_len, device)
    find = partial(_find_ranges, mask, tgt_len, src_len, device)
    groups = mask.cached("ranges", deps, find)  # once for all layers
    blocks = []
    for index, ranges in enumerate(groups):  # one for all sentences, or one for each of them
        begin, end = (index, index + 1) if len(groups) > 1 else (0, batch)
        most = NEAR_QUERIES if near and call.terms.product else MAX_QUERIES
        size = _choose_queries(ranges, mask, most)
        places = []
        for start in range(0, tgt_len, size):
            queries = slice(start, min(start + size, tgt_len))
            of_block = slice(tgt_len - queries.stop, tgt_len - start)  # counted from the first
            keys = slice(min(ranges[0][of_block]), max(ranges[1][of_block]) + 1)
            low, high = keys.start, keys.stop
            if near is not None:
                # Key j is at i' + j - (S - 1) from query i'. The near keys include one of the far
                # ones of each side, so that their rows include those of far ones.
                low = min(max(near[0] - 1 + src_len - queries.stop, low), high - 1)
                high = max(min(near[1] + src_len - queries.start, high), low + 1)
            places.append((queries, keys, slice(low, high)))
        widest = max(keys.stop - keys.start for _, keys, _ in places)
        fitting = max(pairs // (min(size, tgt_len) * widest), 1)  # heads of all sentences together
        sentences = 1 if per_head else max(fitting // heads, 1)
        for b, place in product(range(begin, end, sentences), places):
            of_sentences = slice(b, min(b + sentences, end))
            for h in range(0, heads, fitting):
                blocks.append(Block(of_sentences, slice(h, min(h + fitting, heads)), *place))
    return blocks


def _choose_queries(ranges: Ranges, mask: Mask, most: int) -> int:
    """Choose how many queries a block has, at most ``most``, given the keys that they see."""
    if mask.limits and mask.first_keys is None:  # a window or segments
        # A block has the keys of all its queries: the fewer queries, the fewer hidden pairs.
        widths = [last - first + 1 for first, last in zip(*ranges)]
        few = sum(widths) // len(widths) // KEYS_PER_QUERY // MIN_QUERIES * MIN_QUERIES
        return min(most, max(few, MIN_QUERIES))
    return min(most, FEW_QUERIES) if mask.direction != "both" else most


def find_near(terms: Terms, src_len: int) -> tuple[int, int] | None:
    """Find the distances between which tables have different rows, if there are many others.

    Far pairs must share a row in every table.

    Returns:
        The first distance of the second row, and that of the last row, of all tables together.
    """
    rows = [x for x in (terms.rows("query"), terms.rows("key")) if x is not None]
    starts = [x.runs.starts for x in rows if x.runs is not None and x.runs.starts]  # from row 1 on
    whole = any(x.runs is None for x in rows)  # a row for each distance: no far ones share one
    if not starts or whole or terms.gain is not None or terms.first is not None:
        return None
    low, high = min(x[0] for x in starts), max(x[-1] for x in starts)
    return (low, high) if high - low + NEAR_QUERIES <= MAX_NEAR * src_len else None


def _find_ranges(mask: Mask, tgt_len: int, src_len: int, device: torch.device) -> list[Ranges]:
    """Find the keys that each query may see, for all sentences together or for each of them."""
    if mask.limits:
        if mask.segments is None:
            # A window depends on lengths alone: computed on the CPU, it does not wait for a GPU.
            device = torch.device("cpu")
        found = mask.find_visible_ranges(tgt_len, src_len, device)
        if found is not None:  # the visible keys of each query are one range
            numbers = torch.stack(found).cpu()  # [2, B or 1, T]
            if bool((numbers == numbers[:, :1]).all()):  # all sentences share their blocks
                numbers = numbers[:, :1]
            return [(first, last) for first, last in numbers.transpose(0, 1).tolist()]
    # Without limits, with first keys, or with segments in another order: by the direction alone.
    queries = range(src_len - tgt_len, src_len)
    first = queries if mask.direction == "rl" else [0] * tgt_len
    last = queries if mask.direction == "lr" else [src_len - 1] * tgt_len
    return [(first, last)]
