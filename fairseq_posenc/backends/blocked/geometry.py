"""Divides a call into chunks of sentences and heads, and these into blocks of queries and keys.

For example, causal attention over 1,024 tokens may have two blocks in each chunk: the last 512
queries with all keys, and the first 512 queries with the first 512 keys. A *table* has a row for
each distance between query and key. Queries are stored in reverse, the last one first, so the pair
of query i' and key j has table row i' + j.

Shapes: B batch, H heads, T queries, S keys, D head size; G tables (1 for all heads, or one each), R
rows of a table; c pairs of sentence and head in a chunk, M queries and W keys of a block, N queries
or keys of a tile.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fairseq_posenc.backends.mask import Mask
from fairseq_posenc.encodings.terms import Terms

# The sizes that were fastest in benchmarks.
MAX_QUERIES = 512  # the most queries of a block
PAIRS_PER_THREAD = 2**19  # pairs of a block on a CPU, for each thread of torch
PAIRS_ON_GPU = 2**27  # pairs of a block on a GPU
MIN_QUERIES = 64  # the fewest queries of a block where a window or segments hide most keys
KEYS_PER_QUERY = 8  # keys that a query sees there, on average, for each query of a block
MIN_GAP = 128  # the fewest hidden keys between first keys and a window that are worth skipping
# Sentences are computed one by one if their blocks then have less than this share of the pairs.
SEPARATE_BELOW = 0.8


class Settings(NamedTuple):
    """The settings of a call other than its tensors and sizes."""

    product: bool  # whether the parts of a score are multiplied, else added; False if `folds`
    folds: bool  # whether the parts are multiplied as scaled queries and keys (see `folded.py`)
    scale: float  # factor of the queries
    dropout: float  # probability of dropping a weight
    saves: bool  # whether the backward pass gets the blocks' tensors; else it computes them again
    # by the name of a table, the first distance of each row but the first (see `Runs`)
    starts: Mapping[str, Sequence[int]]
    softcap: float | None  # limit of the scores

    @property
    def saves_weights(self) -> bool:
        """Whether the weights are saved (see :meth:`BlockState.select_saved`)."""
        return self.saves and not self.product


class Chunk(NamedTuple):
    """Sentences and heads that are computed together."""

    sentences: slice
    heads: slice

    def select(self, x: Tensor) -> Tensor:
        """Select this part of ``(B, H, ...)`` as ``(c, ...)``, a view."""
        return x[self].flatten(0, 1)  # [c, ...]

    def split_sentences(self, x: Tensor) -> Tensor:
        """Split ``(c, ...)`` into ``(sentences, heads, ...)``, a view."""
        return x.unflatten(0, (self.sentences.stop - self.sentences.start, -1))


class Block(NamedTuple):
    """Queries of a chunk, and the keys that they may see by direction, window and segments."""

    queries: slice  # counted from the last one back
    keys: slice

    @property
    def shape(self) -> tuple[int, int]:
        """M and W."""
        return self.queries.stop - self.queries.start, self.keys.stop - self.keys.start

    def select_pairs(self, x: Tensor) -> Tensor:
        """Select this part of ``(B or 1, G, T or 1, S)``, ``(B or 1, G, M or 1, W)``: a view."""
        return x[:, :, self.queries if x.size(2) > 1 else slice(None), self.keys]

    @property
    def distance_range(self) -> slice:
        """The M + W - 1 distances of its pairs, counted from the call's lowest one, -(S - 1)."""
        lowest = self.queries.start + self.keys.start
        return slice(lowest, lowest + sum(self.shape) - 1)


# The blocks of the same queries, which share a softmax: more than one if their keys have a gap.
Strip = tuple[Block, ...]


class VisibleKeys(NamedTuple):
    """The lowest and the highest key that each of T queries sees in its window and segment."""

    low: list[int]
    high: list[int]
    # the same among `Locality.first_keys`, which no window hides; low > high if a query sees none
    first_key_ranges: VisibleKeys | None = None

    @classmethod
    def from_ranges(cls, ranges: Sequence[tuple[Tensor, Tensor]]) -> VisibleKeys:
        """Make it from lowest and highest keys, ``(T,)`` each; those of first keys may follow."""
        in_window, *others = (cls(low.tolist(), high.tolist()) for low, high in ranges)
        return in_window._replace(first_key_ranges=others[0]) if others else in_window

    def split_keys(self, first_query: int, last_query: int, tile: int) -> list[slice]:
        """List the keys that some queries see, in parts if there is a gap between them.

        The bounds of parts are multiples of ``tile``.
        """
        low, high = self.low[first_query], self.high[last_query] + 1
        ranges = [(low, high)]
        if self.first_key_ranges is not None:
            begin = min(self.first_key_ranges.low[first_query : last_query + 1])
            end = max(self.first_key_ranges.high[first_query : last_query + 1]) + 1
            # First keys before the window, the window, first keys after it.
            ranges = [(begin, min(end, low)), (low, high), (max(begin, high), end)]
        parts: list[slice] = []
        for start, stop in ranges:
            if start >= stop:
                continue
            start = start // tile * tile
            stop = -(-stop // tile) * tile
            if parts and start - parts[-1].stop < MIN_GAP:
                start = parts.pop().start
            parts.append(slice(start, stop))
        return parts

    def widths(self) -> list[int]:
        """Count the keys from the lowest to the highest one of each query."""
        return [high - low + 1 for low, high in zip(self.low, self.high)]


class Geometry(NamedTuple):
    """The sizes of a call, which decide its chunks and blocks."""

    batch: int  # B
    heads: int  # H
    tgt_len: int  # T
    src_len: int  # S
    # N, queries or keys of a tile that is multiplied with a table of all distances; 1 without one
    tile: int
    direction: str  # see `Mask`
    per_head: bool  # whether a table differs from head to head
    block_pairs: int  # how many pairs of queries and keys make a block
    # for all sentences together, or for each of them; () if a direction alone hides keys
    visible: tuple[VisibleKeys, ...] = ()

    @classmethod
    def from_call(cls, query: Tensor, src_len: int, mask: Mask, terms: Terms) -> Geometry:
        """Choose the sizes of a call's blocks.

        Args:
            query: ``(B, H, T, D)``.
            src_len: S.
            mask: which keys a query may see.
            terms: of the encodings, added to the scores.
        """
        tables = [(name, term, x) for name, term, x in terms.present() if term.rows is not None]
        batch, heads, tgt_len, _ = query.shape
        tile = 1
        if any(term.has_vectors and name not in terms.runs for name, term, _ in tables):
            # Each query (or key) is multiplied with N - 1 table rows that it does not need, so
            # small tiles waste little; but tiles that are too small make slow matrix products.
            tile = 16 if src_len < 128 else 64
        # On a CPU a block's pairs should stay in the caches, and occupy all threads. A GPU needs
        # work for all of its processors at once.
        on_cpu = query.device.type == "cpu"
        block_pairs = PAIRS_PER_THREAD * torch.get_num_threads() if on_cpu else PAIRS_ON_GPU
        per_head = any(term.per_head(x) for _, term, x in tables)
        geometry = cls(batch, heads, tgt_len, src_len, tile, mask.direction, per_head, block_pairs)
        if not mask.locality.limits:
            return geometry
        sizes = tgt_len, src_len, query.device
        ranges = mask.cached(
            "ranges", (*mask.cache_deps, *sizes), lambda: _read_ranges(mask, *sizes)
        )
        if not ranges:
            return geometry
        # The lowest and the highest key that any of the sentences sees.
        joined = VisibleKeys.from_ranges([(low.amin(0), high.amax(0)) for low, high in ranges])
        together = geometry._replace(visible=(joined,))
        sentences = max(len(low) for low, _ in ranges)
        if sentences == 1:
            return together
        expanded = [(x.expand(sentences, -1), y.expand(sentences, -1)) for x, y in ranges]
        by_sentence = [
            VisibleKeys.from_ranges([(low[b], high[b]) for low, high in expanded])
            for b in range(sentences)
        ]
        separate = geometry._replace(visible=tuple(by_sentence))
        return separate if separate.pairs < SEPARATE_BELOW * together.pairs else together

    @property
    def missing(self) -> tuple[int, int]:
        """The numbers of queries and keys that would fill the last tiles."""
        return -self.tgt_len % self.tile, -self.src_len % self.tile

    @property
    def padded(self) -> tuple[int, int]:
        """T and S, padded to whole tiles."""
        return self.tgt_len + self.missing[0], self.src_len + self.missing[1]

    def distances(self, device: torch.device) -> Tensor:
        """List the distances of padded queries and keys, ``(1, R)``, in the order of table rows."""
        return torch.arange(sum(self.padded) - 1, device=device)[None] - (self.src_len - 1)

    @property
    def pairs(self) -> int:
        """The number of pairs in all blocks."""
        return sum(
            (chunk.sentences.stop - chunk.sentences.start)
            * (chunk.heads.stop - chunk.heads.start)
            * sum(math.prod(block.shape) for strip in strips for block in strip)
            for chunk, strips in self.split_chunks()
        )

    def split_chunks(self) -> Iterator[tuple[Chunk, list[Strip]]]:
        """Yield sentences and heads to compute together, and the blocks that hold their pairs."""
        separate = len(self.visible) > 1
        for index, visible in enumerate(self.visible or (None,)):
            begin, end = (index, index + 1) if separate else (0, self.batch)
            sentences, heads, queries = self._choose_sizes(end - begin, visible)
            strips = list(self._split_strips(queries, visible))
            for b in range(begin, end, sentences):
                chunk_sentences = slice(b, min(b + sentences, end))
                for h in range(0, self.heads, heads):
                    yield Chunk(chunk_sentences, slice(h, min(h + heads, self.heads))), strips

    def _split_strips(self, queries: int, visible: VisibleKeys | None) -> Iterator[Strip]:
        """Yield the blocks of ``queries`` queries each, with the keys that any of these sees."""
        tgt_len, src_len = self.padded
        for start in range(0, tgt_len, queries):
            end = min(start + queries, tgt_len)
            # Queries start .. end from the back are T - end .. T - start from the front, and the
            # tokens S - end .. S - start. Padding makes `end` greater than T in the last tile.
            if visible is not None:
                first_query = max(self.tgt_len - end, 0)
                last_query = max(self.tgt_len - start - 1, 0)
                parts = visible.split_keys(first_query, last_query, self.tile)
            else:
                low = max(self.src_len - end, 0) if self.direction == "rl" else 0
                high = max(self.src_len - start, 1) if self.direction == "lr" else src_len
                parts = [slice(low // self.tile * self.tile, -(-high // self.tile) * self.tile)]
            yield tuple(Block(slice(start, end), keys) for keys in parts)

    def _choose_sizes(self, sentences: int, visible: VisibleKeys | None) -> tuple[int, int, int]:
        """Choose how many of the sentences and heads a chunk has, and how many queries a block."""
        tgt_len, keys = self.padded  # a block has as many keys at most
        queries = min(MAX_QUERIES, tgt_len)
        if visible is not None:
            # A block has the keys of all its queries: the fewer queries, the fewer hidden pairs.
            widths = visible.widths()
            mean_width = sum(widths) // len(widths)
            queries = min(queries, max(mean_width // KEYS_PER_QUERY, MIN_QUERIES))
            keys = min(keys, max(widths) + queries)
        queries = max(queries // self.tile, 1) * self.tile
        fitting_heads = max(self.block_pairs // (queries * keys), 1)  # of all sentences together
        if fitting_heads < self.heads or self.per_head:
            return 1, min(fitting_heads, self.heads), queries
        return min(fitting_heads // self.heads, sentences), self.heads, queries


def _read_ranges(
    mask: Mask, tgt_len: int, src_len: int, device: torch.device
) -> list[tuple[Tensor, Tensor]]:
    """Compute the lowest and highest key that each query sees, ``(B or 1, T)`` each, on the CPU.

    If there are first keys, their ranges follow. The list may also be empty.
    """
    limits = mask.locality
    if limits.segments is None and limits.first_keys is None:
        # A window depends on lengths alone: computed on the CPU, it does not wait for a GPU.
        device = torch.device("cpu")
    ranges = [mask.without_first_keys.find_visible_ranges(tgt_len, src_len, device)]
    if limits.first_keys is not None:
        ranges.append(mask.find_first_key_ranges(tgt_len, src_len, device))
    # All are None if segments do not ascend: then the visible keys are not ranges.
    return [(x[0].cpu(), x[1].cpu()) for x in ranges if x is not None]
