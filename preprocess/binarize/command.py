"""Makes data-bins, their shards, or only a dictionary; all programs for running text call it.

A split of a data-bin (train, valid or test) is a data set of fairseq in its mmap format: ``.bin``
has the tokens of all items, ``.idx`` the size of each. The items are the samples.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from itertools import chain
from typing import Any

import numpy as np
from fairseq.data import Dictionary

from fairseq_posenc.checkpoints.dictionary import DICTIONARY, load_dictionary
from fairseq_posenc.errors import UserError
from fairseq_posenc.folders import checksum
from fairseq_posenc.tokens.data_set import write_index
from fairseq_posenc.tokens.symbols import SymbolEncoder, warn_of_unknown
from fairseq_posenc.tokens.tokenizer import Encoder, token_dtype

from .formats import LineFormat, describe_format
from .items import InvalidLine, describe_invalid, make_items, read_lines
from .options import BinarizeSettings
from .output import Manifest, describe_file, format_counts, make_folder, open_at, say, sync
from .pool import map_chunks
from .sources import Extent, combine_checksums, find_files, parts_of_shard, read_chunks
from .vocabulary import PACKAGES, save_dictionary

_PADDING_FACTOR = 8  # dictionaries are padded to a multiple of it, as in fairseq
# Settings that do not change the content of a data-bin, or that stand elsewhere in its request.
_UNREQUESTED = ("line_format", "inputs", "vocabulary", "out", "dict_only", "workers")
_MAX_REPORTED = 10  # invalid lines; all are counted
_SIZE = np.dtype(np.int32)  # type of the sizes in an .idx file


@dataclass
class SplitProgress:
    """The entry of a split in the manifest; everything in it is synced to disk."""

    inputs: list[dict[str, Any]] = field(default_factory=list)  # the finished parts
    counts: dict[str, int] = field(default_factory=dict)  # of the finished parts
    invalid_lines: list[str] = field(default_factory=list)  # messages about the first ones
    outputs: dict[str, Any] = field(default_factory=dict)  # the files, once all parts are finished


def run(args: argparse.Namespace, line_format: LineFormat) -> None:
    """Make the data-bin or dictionary that the options of ``options.add_arguments`` describe.

    Finished parts of an interrupted run are kept.

    Raises:
        UserError: the options or the input are wrong, or the folder has other settings.
    """
    settings = BinarizeSettings.from_args(args, line_format)
    if settings.dict_only:
        path = settings.out / DICTIONARY
        if path.exists():
            raise UserError(f"{path} is there already; delete it, or choose another --out")
        save_dictionary(_count_dictionary(settings, _find_parts(settings, "train")), path)
        say(f"wrote {path}")
        return
    # fairseq reads valid and test only from the first shard.
    splits = [name for name in settings.inputs if name == "train" or settings.shard == 0]
    parts = {
        split: [part.with_checksum() for part in _find_parts(settings, split)] for split in splits
    }
    request = {
        "options": {name: v for name, v in vars(settings).items() if name not in _UNREQUESTED},
        "corpus": describe_format(line_format),
        "files": settings.vocabulary.checksums(),
        "inputs": {split: combine_checksums(found) for split, found in parts.items()},
        "packages": {name: version(name) for name in PACKAGES},
    }
    make_folder(settings.folder, request, partial(_write_splits, settings, parts))


def _write_splits(
    settings: BinarizeSettings, parts: dict[str, list[Extent]], manifest: Manifest
) -> None:
    """Write the dictionary and the splits of a data-bin."""
    path = manifest.folder / DICTIONARY
    if not settings.makes_dictionary:
        dictionary = settings.vocabulary.load_dictionary()
        settings.vocabulary.write_dictionary(dictionary, path)
    else:
        if not path.exists():
            save_dictionary(_count_dictionary(settings, parts["train"]), path)
        dictionary = load_dictionary(path, mask=False)
    if settings.words or settings.characters:
        encoder: Encoder = SymbolEncoder(settings.splitter, dictionary)
    else:
        encoder = settings.vocabulary.load_tokenizer(dictionary)
    manifest.entries[DICTIONARY] = {"symbols": len(dictionary), "sha256": checksum(path)}
    for name, found in parts.items():
        counts = write_split(name, found, settings, encoder, dictionary, manifest)
        print(f"{name}: {format_counts(counts)}", flush=True)
        lines = counts["items"] - counts.get("cuts", 0)  # items with </s>: not all parts of a line
        warn_of_unknown(name, counts["unknown_tokens"], counts["tokens"] - lines)
    for sizes in manifest.folder.glob("*.sizes"):
        sizes.unlink()


def write_split(
    name: str,
    parts: Sequence[Extent],
    settings: BinarizeSettings,
    encoder: Encoder,
    dictionary: Dictionary,
    manifest: Manifest,
) -> dict[str, int]:
    """Write a split, from the first part that is not finished; return its counts.

    The sizes of the items are collected in ``NAME.sizes``, a temporary file.

    Raises:
        UserError: a line is invalid, or the text is empty.
    """
    progress = SplitProgress(**(manifest.read("splits", name) or {}))
    counts = Counter(progress.counts)
    if progress.outputs:
        return progress.counts
    dtype = token_dtype(dictionary)
    tokens_path, sizes_path, index_path = (
        manifest.folder / f"{name}.{suffix}" for suffix in ("bin", "sizes", "idx")
    )
    encode = partial(make_items, settings=settings, encoder=encoder, unk=dictionary.unk())
    chunks = read_chunks(parts[len(progress.inputs) :])
    document_ended = True  # whether an empty item must precede the next item
    with (
        open_at(tokens_path, counts["tokens"] * dtype.itemsize) as tokens,
        open_at(sizes_path, counts["items"] * _SIZE.itemsize) as sizes,
    ):
        for chunk, items in map_chunks(chunks, settings.workers, encode):
            for message in describe_invalid(items.invalid, chunk, settings.invalid_lines):
                if len(progress.invalid_lines) < _MAX_REPORTED:
                    progress.invalid_lines.append(message)
                    say(f"skipped {message}")
            document_ended |= items.begins_with_blank
            if items.sizes:
                if document_ended and counts["items"] and settings.empty_lines == "documents":
                    tokens.write(dtype.type(dictionary.eos()).tobytes())
                    sizes.write(_SIZE.type(1).tobytes())
                    counts.update(items=1, tokens=1, document_ends=1)
                tokens.write(items.tokens)
                sizes.write(items.sizes)
                document_ended = items.ends_with_blank
            counts.update(items.counts)
            if chunk.ends_part:
                document_ended = True
                sync(tokens, sizes)
                progress.inputs.append({**chunk.part._asdict(), "lines": chunk.lines_before})
                progress.counts = dict(sorted(counts.items()))
                manifest.save("splits", name, vars(progress))
                say(f"{name}: {counts['tokens']:,} tokens")
    if not counts["items"]:
        raise UserError(f"{name}: no line of its text is left")
    write_index(index_path, np.fromfile(sizes_path, _SIZE), dtype)
    progress.outputs = {path.name: describe_file(path) for path in (tokens_path, index_path)}
    manifest.save("splits", name, vars(progress))
    return progress.counts


def _find_parts(settings: BinarizeSettings, split: str) -> list[Extent]:
    """Find the parts of a split; only ``train`` is divided into shards."""
    files = find_files(settings.inputs[split])
    if split == "train":
        return parts_of_shard(files, settings.shard, settings.num_shards)
    return parts_of_shard(files)


def _count_dictionary(settings: BinarizeSettings, parts: Sequence[Extent]) -> Dictionary:
    """Build the dictionary of the training text, the same as ``fairseq-preprocess`` builds."""
    counter = Counter[str]()
    count = partial(count_symbols, settings=settings)
    for chunk, (counts, invalid) in map_chunks(read_chunks(parts), settings.workers, count):
        describe_invalid(invalid, chunk, settings.invalid_lines)
        counter.update(counts)
    dictionary = Dictionary()
    for symbol, number in sorted(counter.items()):
        dictionary.add_symbol(symbol, number)
    dictionary.finalize(settings.min_count, settings.max_symbols, _PADDING_FACTOR)
    return dictionary


def count_symbols(
    data: bytes, settings: BinarizeSettings
) -> tuple[Counter[str], list[InvalidLine]]:
    """Count the symbols of a chunk; also return the lines that are left out."""
    lines, _, invalid = read_lines(data, settings.line_format, settings.sentences)
    return Counter(chain.from_iterable(settings.splitter(lines))), invalid
