"""Makes data-bins of running text; all programs for it call this module.

A split of a data-bin (train, valid or test) is a data set of fairseq in its mmap format: ``.bin``
has the tokens of all items, ``.idx`` the size of each. The items are the samples.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from fairseq.data import Dictionary

from fairseq_posenc.checkpoints.dictionary import DICTIONARY, load_dictionary
from fairseq_posenc.errors import UserError, counted
from fairseq_posenc.folders import checksum
from fairseq_posenc.tokens.tokenizer import (
    Splitter,
    SymbolEncoder,
    token_dtype,
    warn_of_unknown,
    write_index,
)

from .formats import LineFormat, describe_format
from .items import InvalidLine, Items, check_invalid, make_items, read_lines
from .options import BinarizeSettings
from .output import Manifest, describe_file, format_counts, make_folder, open_at, say, sync
from .pool import map_chunks
from .sources import SourceFile, combine_checksums, find_files, read_chunks, read_source
from .vocabulary import PACKAGES, save_dictionary

_PADDING_FACTOR = 8  # dictionaries are padded to a multiple of it, as in fairseq
_MAX_REPORTED = 10  # maximum number of skipped lines reported for a split; all are counted
_SIZE = np.dtype(np.int32)  # type of the sizes in an .idx file
# The settings on which the content of a data-bin depends, besides its text and vocabulary.
_TOKEN_OPTIONS = ("words", "characters", "keep_spaces", "min_count", "max_symbols")
_LINE_OPTIONS = ("sentences", "empty_lines", "longest_line", "invalid_lines")


def run(args: argparse.Namespace, line_format: LineFormat) -> None:
    """Make the data-bin that the options of ``options.add_arguments`` describe.

    Finished files of an interrupted run are kept.

    Raises:
        UserError: the options or the input are wrong, or the folder has other settings.
    """
    settings = BinarizeSettings.from_args(args, line_format)
    files = {
        split: [read_source(path) for path in find_files(given, settings.out)]
        for split, given in settings.inputs.items()
    }
    request = {
        "options": {name: getattr(settings, name) for name in _TOKEN_OPTIONS + _LINE_OPTIONS},
        "corpus": describe_format(line_format),
        "files": settings.vocabulary.checksums(),
        "inputs": {split: combine_checksums(found) for split, found in files.items()},
        "packages": {name: version(name) for name in PACKAGES},  # token ids depend on these
    }
    make_folder(settings.out, request, partial(_fill_folder, settings, files))


def _fill_folder(
    settings: BinarizeSettings, files: Mapping[str, Sequence[SourceFile]], manifest: Manifest
) -> None:
    """Write the dictionary and the splits of a data-bin."""
    path = manifest.folder / DICTIONARY
    dictionary = _write_dictionary(settings, files.get("train", ()), path)
    entry = {"symbols": len(dictionary), "sha256": checksum(path)}
    manifest.entries[DICTIONARY] = entry  # saved with the next split
    if settings.words or settings.characters:
        encoder: SymbolEncoder = SymbolEncoder(settings.splitter, dictionary)
    else:
        encoder = settings.vocabulary.load_tokenizer(dictionary)
    for name, found in files.items():
        counts = write_split(name, found, settings, encoder, dictionary, manifest)
        print(f"{name}: {format_counts(counts)}", flush=True)
        lines = counts["items"] - counts.get("cuts", 0)  # only the last part of a line has </s>
        warn_of_unknown(name, counts["unknown_tokens"], counts["tokens"] - lines)  # without </s>
    for sizes in manifest.folder.glob("*.sizes"):  # temporary files of `write_split`
        sizes.unlink()


def _write_dictionary(
    settings: BinarizeSettings, train: Sequence[SourceFile], path: Path
) -> Dictionary:
    """Write the given dictionary or, unless the file exists, one of the training text."""
    if not settings.makes_dictionary:
        dictionary = settings.vocabulary.load_dictionary()
        settings.vocabulary.write_dictionary(dictionary, path)
        return dictionary
    if not path.exists():
        save_dictionary(_count_dictionary(settings, train), path)
    return load_dictionary(path, mask=False)  # tasks of masked LMs add <mask>


@dataclass
class SplitProgress:
    """The entry of a split in the manifest; everything in it is synced to disk."""

    # Path, checksum and number of lines of each finished file.
    inputs: list[dict[str, str | int]] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)  # `Items.counts` of the finished files
    invalid_lines: list[str] = field(default_factory=list)  # messages about the first ones
    outputs: dict[str, Any] = field(default_factory=dict)  # the split, once all files are finished

    def report_invalid(self, messages: Sequence[str]) -> None:
        """Report and keep messages about skipped lines, up to ``_MAX_REPORTED`` in all."""
        for message in messages[: _MAX_REPORTED - len(self.invalid_lines)]:
            self.invalid_lines.append(message)
            say(f"skipped {message}")


@dataclass
class ItemWriter:
    """Appends items to the files of a split, and an empty item between documents of two chunks.

    Inside a chunk, ``make_items`` separates them. The last document has no empty item after it, so
    one is written only when the next document comes.
    """

    tokens: BinaryIO  # file of the tokens
    sizes: BinaryIO  # file of the items' sizes
    separator: np.integer | None  # token of the empty item between documents; None to write none
    counts: Counter[str]  # sums of `Items.counts`, also of interrupted runs
    document_ended: bool = True  # also where a run resumes, at the beginning of a file

    def write(self, items: Items) -> None:
        """Append the items of a chunk."""
        self.document_ended |= items.begins_with_blank
        if items.sizes:  # bytes: empty if the chunk has no item
            if self.document_ended and self.counts["items"] and self.separator is not None:
                self.tokens.write(self.separator.tobytes())
                self.sizes.write(_SIZE.type(1).tobytes())  # one token: `separator`
                self.counts.update(items=1, tokens=1, document_ends=1)
            self.tokens.write(items.tokens)
            self.sizes.write(items.sizes)
            self.document_ended = items.ends_with_blank
        self.counts.update(items.counts)


def write_split(
    name: str,
    files: Sequence[SourceFile],
    settings: BinarizeSettings,
    encoder: SymbolEncoder,
    dictionary: Dictionary,
    manifest: Manifest,
) -> dict[str, int]:
    """Write a split, from the first file that is not finished; return its counts.

    What an interrupted run wrote of that file is dropped. ``NAME.sizes`` collects items' sizes.

    Raises:
        UserError: a line is invalid, or the text is empty.
    """
    progress = SplitProgress(**(manifest.read("splits", name) or {}))
    if progress.outputs:  # an interrupted run finished the split
        return progress.counts
    counts, dtype = Counter(progress.counts), token_dtype(dictionary)
    tokens_path, sizes_path, index_path = (
        manifest.folder / f"{name}.{suffix}" for suffix in ("bin", "sizes", "idx")
    )
    encode = partial(
        make_items,
        line_format=settings.line_format,
        sentences=settings.sentences,
        empty_lines=settings.empty_lines,
        longest_line=settings.longest_line,
        encoder=encoder,
        unk=dictionary.unk(),
    )
    separator = dtype.type(dictionary.eos()) if settings.empty_lines == "documents" else None
    chunks = read_chunks(files[len(progress.inputs) :])
    with (
        open_at(tokens_path, counts["tokens"] * dtype.itemsize) as tokens,
        open_at(sizes_path, counts["items"] * _SIZE.itemsize) as sizes,
    ):
        writer = ItemWriter(tokens, sizes, separator, counts)
        for chunk, items in map_chunks(chunks, settings.workers, encode):
            progress.report_invalid(check_invalid(items.invalid, chunk, settings.invalid_lines))
            writer.write(items)
            if chunk.ends_file:  # an empty chunk, with all lines before it; a rerun continues here
                writer.document_ended = True  # no document continues in the next file
                sync(tokens, sizes)
                progress.inputs.append({**chunk.file._asdict(), "lines": chunk.lines_before})
                progress.counts = dict(sorted(writer.counts.items()))
                manifest.save("splits", name, asdict(progress))
                say(f"{name}: {counted(writer.counts['tokens'], 'tokens')}")
    if not writer.counts["items"]:
        raise UserError(f"{name}: no line of its text is left")
    write_index(index_path, np.fromfile(sizes_path, _SIZE), dtype)
    progress.outputs = {path.name: describe_file(path) for path in (tokens_path, index_path)}
    manifest.save("splits", name, asdict(progress))
    return progress.counts


def _count_dictionary(settings: BinarizeSettings, files: Sequence[SourceFile]) -> Dictionary:
    """Build the dictionary of the training text, the same as ``fairseq-preprocess`` builds."""
    counter = Counter[str]()
    count = partial(
        count_symbols,
        line_format=settings.line_format,
        sentences=settings.sentences,
        splitter=settings.splitter,
    )
    for chunk, (counts, invalid) in map_chunks(read_chunks(files), settings.workers, count):
        check_invalid(invalid, chunk, settings.invalid_lines)  # may raise; `write_split` reports
        counter.update(counts)
    dictionary = Dictionary()
    for symbol, number in sorted(counter.items()):
        dictionary.add_symbol(symbol, number)
    dictionary.finalize(settings.min_count, settings.max_symbols, _PADDING_FACTOR)
    return dictionary


def count_symbols(
    data: bytes, line_format: LineFormat, sentences: bool, splitter: Splitter
) -> tuple[Counter[str], list[InvalidLine]]:
    """Count the symbols of a chunk; also return the lines that are left out."""
    lines, _, invalid = read_lines(data, line_format, sentences)  # _: counts of the lines
    return Counter(chain.from_iterable(splitter(lines))), invalid
