"""Divides a call into blocks: some sentences, heads and queries, and the keys that these may see.

For example, causal attention over 512 tokens may have two blocks a head: the last 256 queries
with all keys, and the first 256 queries with the first 256 keys. Queries are stored in reverse, the
last one first, so that query i' and key j have the distance i' + j, counted from the call's lowest.

Shapes: B batch, H heads, T queries, S keys.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

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
# The most queries where a direction hides keys, or where keys are far (`Block.far`): the fewer
# queries a block has, the more of its pairs can be left out as hidden, or treated as far.
FEW_QUERIES = 256
MAX_NEAR = 0.75  # of the keys: if more are near some query of a block, none is treated as far

# The first and the last key that each of T queries sees.
Ranges = tuple[Sequence[int], Sequence[int]]


@dataclass(frozen=True)
class Block:
    """Some sentences, heads and queries of a call, with a range of keys.

    >>> block = Block(slice(0, 1), slice(0, 2), queries=slice(2, 4), keys=slice(0, 3))
    >>> block.select(torch.arange(10, 16), "R")  # of the distances of queries 2, 3 to keys 0, 1, 2
    tensor([12, 13, 14, 15])
    """

    sentences: slice
    heads: slice
    queries: slice  # counted back from the last one
    keys: slice
    # How many of the keys, the first ones, are far before all queries, and how many, the last ones,
    # far after them: their pairs have the first, and the last, row of each table.
    far: tuple[int, int] = (0, 0)

    @cached_property
    def _places(self) -> dict[str, slice]:
        """The places by the letters of :meth:`select`; distances are i' + j, from the lowest."""
        first, last = self.queries.start, self.queries.stop - 1
        begin, end = self.keys.start, self.keys.stop
        low, high = begin + self.far[0], end - self.far[1]  # of near keys
        places = {"B": self.sentences, "H": self.heads, "T": self.queries, "S": self.keys}
        places |= {"R": slice(first + begin, last + end), "r": slice(first + low, last + high)}
        return places | {"b": slice(begin, low), "n": slice(low, high), "a": slice(high, end)}

    def list_places(self, src_len: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """List the indices of queries, ``(M, 1)``, and of keys, ``(1, W)``, among all tokens."""
        queries = torch.arange(self.queries.start, self.queries.stop, device=device)
        keys = torch.arange(self.keys.start, self.keys.stop, device=device)
        return src_len - 1 - queries[:, None], keys[None]

    def select(self, x: Tensor, axes: str) -> Tensor:
        """Select this block of a tensor, as a view.

        Args:
            x: the tensor; a dimension of size 1 is kept whole, as it is for all.
            axes: a letter for each dimension: B, H, T and S as above; b the keys that are far
                before all queries, a those far after them, n the near ones between; R the distances
                of all keys, r of near ones. Dimensions with other letters are taken whole.
        """
        whole, places = slice(None), self._places
        return x[tuple([places.get(y, whole) if n > 1 else whole for y, n in zip(axes, x.shape)])]


def split(call: AttentionCall) -> list[Block]:
    """List the blocks that hold all visible pairs of a call."""
    batch, heads, tgt_len, _ = call.query.shape
    src_len, device, mask = call.key.size(2), call.query.device, call.mask
    # With a table for each head, a block has one sentence, as `bands` multiplies each head by its
    # table in a product whose batch dimension holds heads and sentences.
    per_head = any(term.per_head for term in call.terms if isinstance(term, ByDistance))
    # A block's pairs should stay in a CPU's caches and occupy its threads, or fill a GPU.
    pairs = PAIRS_PER_THREAD * torch.get_num_threads() if device.type == "cpu" else PAIRS_ON_GPU
    deps = (*mask.cache_deps, tgt_len, src_len, device)  # the ranges are found once for all layers
    groups = mask.cached("ranges", deps, lambda: _find_ranges(mask, tgt_len, src_len, device))
    near = _find_near(call.terms, src_len)
    blocks: list[Block] = []
    for index, (first, last) in enumerate(groups):  # for all sentences, or for each of them
        begin, end = (index, index + 1) if len(groups) > 1 else (0, batch)
        size = _choose_queries(first, last, mask, has_far=near is not None)
        places = []
        for start in range(0, tgt_len, size):
            queries = slice(start, min(start + size, tgt_len))
            of_block = slice(tgt_len - queries.stop, tgt_len - start)  # counted from the first
            keys = slice(min(first[of_block]), max(last[of_block]) + 1)
            far = (0, 0) if near is None else _count_far(*near, queries, keys, src_len)
            places.append((queries, keys, far))
        widest = max(keys.stop - keys.start for _, keys, _ in places)
        # How many heads fit into a block, of all of its sentences together.
        fitting = max(pairs // (min(size, tgt_len) * widest), 1)
        sentences = 1 if per_head else max(fitting // heads, 1)
        for b, (queries, keys, far) in product(range(begin, end, sentences), places):
            of_sentences = slice(b, min(b + sentences, end))
            of_heads = [slice(h, min(h + fitting, heads)) for h in range(0, heads, fitting)]
            blocks += [Block(of_sentences, x, queries, keys, far) for x in of_heads]
    return blocks


def _count_far(low: int, high: int, queries: slice, keys: slice, src_len: int) -> tuple[int, int]:
    """Count a block's far keys (:attr:`Block.far`), given the distances of :func:`_find_near`."""
    # The distance of key j from query i' is i' + j - (S - 1).
    first_near = low + src_len - queries.stop  # the first key that is near for any query
    first_after = high + src_len - 1 - queries.start  # the first one that is far after all
    first_near = min(max(first_near, keys.start), keys.stop - 1)  # at least one key is near
    return first_near - keys.start, keys.stop - max(min(first_after, keys.stop), first_near + 1)


def _choose_queries(first: Sequence[int], last: Sequence[int], mask: Mask, has_far: bool) -> int:
    """Choose how many queries a block has, given the first and the last key that each sees."""
    most = FEW_QUERIES if has_far or mask.direction != "both" else MAX_QUERIES
    if mask.has_limits and mask.first_keys is None:  # segments, or a window that hides first keys
        # A block has the keys of all its queries: the fewer queries, the fewer hidden pairs.
        widths = [end - begin + 1 for begin, end in zip(first, last)]
        few = sum(widths) // len(widths) // KEYS_PER_QUERY // MIN_QUERIES * MIN_QUERIES
        return min(most, max(few, MIN_QUERIES))
    return most


def _find_near(terms: Terms, src_len: int) -> tuple[int, int] | None:
    """Find the distances between which the rows of tables differ, if there are many others.

    Keys are *near* a query at these distances. For all far keys before it, every table of vectors
    has its first row, and for all after it, its last one. The result is None with a gain or a
    reset, which change the products of far pairs one by one; a bias is added to all scores later.

    Returns:
        The first distance of the second row, and that of the last row, of all tables together.
    """
    rows = [x for x in (terms.rows("query"), terms.rows("key")) if x is not None]
    starts = [x.runs.starts for x in rows if x.runs is not None and x.runs.starts]  # of rows 1, 2..
    whole = any(x.runs is None for x in rows)  # a row for each distance: no far ones share one
    if not starts or whole or terms.gain is not None or terms.first is not None:
        return None
    low, high = min(x[0] for x in starts), max(x[-1] for x in starts)
    return (low, high) if high - low + FEW_QUERIES <= MAX_NEAR * src_len else None


def _find_ranges(mask: Mask, tgt_len: int, src_len: int, device: torch.device) -> list[Ranges]:
    """Find the keys that each query may see, for all sentences together or for each of them."""
    if mask.has_limits:
        # A window depends on lengths alone: computed on the CPU, it does not wait for a GPU.
        device = torch.device("cpu") if mask.segments is None else device
        if found := mask.find_visible_ranges(tgt_len, src_len, device):  # one range for each query
            numbers = torch.stack(found).cpu()  # [2, B or 1, T]
            if bool((numbers == numbers[:, :1]).all()):  # all sentences share their blocks
                numbers = numbers[:, :1]
            return [(first, last) for first, last in numbers.transpose(0, 1).tolist()]
    # No limits, first keys that no window hides, or unordered segments: by the direction alone.
    queries = range(src_len - tgt_len, src_len)
    first = queries if mask.direction == "rl" else [0] * tgt_len
    last = queries if mask.direction == "lr" else [src_len - 1] * tgt_len
    return [(first, last)]
