"""Makes data-bins, their shards, or only a dictionary; all programs for running text call it."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from functools import partial
from importlib.metadata import version
from itertools import chain

from fairseq.data import Dictionary

from fairseq_posenc.checkpoints.dictionary import DICTIONARY, load_dictionary
from fairseq_posenc.errors import UserError
from fairseq_posenc.folders import checksum
from fairseq_posenc.tokens.symbols import SymbolEncoder, warn_of_unknown

from .formats import LineFormat, check_format, describe_format
from .items import InvalidLine, describe_invalid, read_lines
from .options import BinarizeSettings
from .output import Manifest, format_counts, make_folder, say
from .pool import map_chunks
from .shards import Extent, combine_checksums, find_files, parts_of_shard
from .sources import read_chunks
from .split import write_split
from .vocabulary import PACKAGES, save_dictionary

_PADDING_FACTOR = 8  # dictionaries are padded to a multiple of it, as in fairseq
# Settings that do not change the content of a data-bin, or that stand elsewhere in its request.
_UNREQUESTED = ("line_format", "inputs", "vocabulary", "out", "dict_only", "workers")


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
    tokenizer = settings.vocabulary.load_encoder(dictionary)
    encoder = tokenizer or SymbolEncoder(settings.splitter, dictionary)
    manifest.entries[DICTIONARY] = {"symbols": len(dictionary), "sha256": checksum(path)}
    for name, found in parts.items():
        counts = write_split(name, found, settings, encoder, dictionary, manifest)
        print(f"{name}: {format_counts(counts)}", flush=True)
        lines = counts["items"] - counts.get("cuts", 0)  # items with </s>: not all parts of a line
        warn_of_unknown(name, counts["unknown_tokens"], counts["tokens"] - lines)
    for sizes in manifest.folder.glob("*.sizes"):
        sizes.unlink()


def _find_parts(settings: BinarizeSettings, split: str) -> list[Extent]:
    """Find the parts of a split; only ``train`` is divided into shards."""
    files = find_files(settings.inputs[split])
    check_format(settings.line_format, files)
    if split == "train":
        return parts_of_shard(files, settings.shard, settings.num_shards)
    return parts_of_shard(files)


def _count_dictionary(settings: BinarizeSettings, parts: Sequence[Extent]) -> Dictionary:
    """Build the dictionary of the training text, the same as ``fairseq-preprocess`` builds."""
    counter = Counter[str]()
    count = partial(count_symbols, settings=settings)
    for chunk, (counts, invalid) in map_chunks(read_chunks(parts), settings.workers, count):
        describe_invalid(invalid, chunk, settings.skips_invalid)
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
