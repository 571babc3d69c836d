"""A fairseq dictionary from training text, equal to the one that ``fairseq-preprocess`` makes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from fairseq.data import Dictionary

from fairseq_posenc.errors import UserError
from fairseq_posenc.tokens.symbols import Splitter

from .items import Text, count_symbols, describe_invalid
from .pool import pool
from .shards import Part
from .sources import Reader

_PADDING_FACTOR = 8  # fairseq's: a size that suits matrix hardware


def build_dictionary(
    parts: Sequence[Part],
    text: Text,
    split: Splitter,
    workers: int,
    *,
    min_count: int,
    max_symbols: int,
    skip_invalid: bool,
) -> Dictionary:
    """Count the symbols of a text and return them, the frequent ones first.

    Args:
        parts: the text.
        text: how it becomes lines.
        split: how a line becomes symbols.
        workers: number of processes.
        min_count: leave out what occurs more rarely.
        max_symbols: size of the dictionary, fairseq's own symbols included; -1 for all.
        skip_invalid: pass over invalid lines.

    Raises:
        UserError: a line is invalid.
    """
    counter: Counter[str] = Counter()
    with pool(workers, count_symbols, text, split) as opened:
        for (part, line), (counts, read) in opened.map(_chunks(parts)):
            for message in describe_invalid(read.invalid, part.path, line):
                if not skip_invalid:
                    raise UserError(f"{message}; mend the file, or use --invalid-lines skip")
            counter.update(counts)
    dictionary = Dictionary()
    for symbol, count in sorted(counter.items()):
        dictionary.add_symbol(symbol, count)
    dictionary.finalize(min_count, max_symbols, _PADDING_FACTOR)
    return dictionary


def _chunks(parts: Sequence[Part]) -> Iterator[tuple[tuple[Part, int], bytes]]:
    for part in parts:
        line = 0
        for chunk in Reader(part):
            yield (part, line), chunk.data
            line += chunk.lines
