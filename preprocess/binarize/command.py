"""Makes data-bins, their shards, or only a dictionary; all programs for running text call it."""

from __future__ import annotations

import argparse
from collections import Counter
from importlib.metadata import version
from typing import Any

from fairseq.data import Dictionary

from fairseq_posenc.checkpoints.dictionary import DICTIONARY, load_dictionary
from fairseq_posenc.errors import UserError
from fairseq_posenc.folders import checksum, whole_folder
from fairseq_posenc.tokens.symbols import SymbolEncoder, warn_of_unknown
from fairseq_posenc.tokens.tokenizer import SpecialSymbols

from .formats import LineFormat, check_format, describe_format
from .items import count_symbols, make_items, skip_or_refuse
from .options import BinarizeSettings
from .output import Manifest, check_made, format_counts, say
from .pool import Pool
from .shards import Input, combine_checksums, find_files, parts_of_shard
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
    if not settings.dict_only:
        _write_folder(settings)
        return
    path = settings.out / DICTIONARY
    if path.exists():
        raise UserError(f"{path} is there already; delete it, or choose another --out")
    save_dictionary(_count_dictionary(settings), path)
    say(f"wrote {path}")


def _write_folder(settings: BinarizeSettings) -> None:
    """Write the data-bin, or one shard of it."""
    vocabulary = settings.vocabulary
    # fairseq reads valid and test only from the first shard.
    splits = [name for name in settings.inputs if name == "train" or settings.shard == 0]
    inputs = {split: list(map(Input.from_part, _find_parts(settings, split))) for split in splits}
    request = _make_request(settings, inputs)
    if check_made(settings.folder, request):
        return
    # Loaded now, so that a broken dictionary is refused before anything is written.
    dictionary = None if settings.makes_dictionary else vocabulary.load_dictionary()
    with whole_folder(settings.folder, request) as partial:
        path = partial / DICTIONARY
        if dictionary is not None:
            vocabulary.write_dictionary(dictionary, path, request["files"])
        else:
            if not path.exists():
                save_dictionary(_count_dictionary(settings), path)
            dictionary = load_dictionary(path, mask=False)
        symbols = SpecialSymbols.from_dictionary(dictionary)
        tokenizer = vocabulary.load_encoder(dictionary)
        encoder = tokenizer or SymbolEncoder(settings.splitter, dictionary)
        manifest = Manifest(partial, request)
        manifest.save(DICTIONARY, {"symbols": len(dictionary), "sha256": checksum(path)})
        with Pool(settings.workers, make_items, settings, encoder, symbols) as pool:
            for name in splits:
                entry = write_split(name, inputs[name], symbols, settings, manifest, pool)
                _report(name, entry["counts"])
    say(f"wrote {settings.folder}")


def _report(name: str, counts: dict[str, int]) -> None:
    """Print the counts of a split, and warn of unlikely ones."""
    print(f"{name}: {format_counts(counts)}", flush=True)
    lines = counts["items"] - counts.get("cuts", 0)  # items with </s>: not all parts of a line
    warn_of_unknown(name, counts["unknown_tokens"], counts["tokens"] - lines)
    if special := counts.get("special_tokens"):
        say(f"warning: {name} has {special:,} words that fairseq takes for <s>, </s> or <pad>")


def _find_parts(settings: BinarizeSettings, split: str) -> list[Any]:
    """Find the parts of a split; only ``train`` is divided into shards."""
    files = find_files(settings.inputs[split])
    check_format(settings.line_format, files)
    if split == "train":
        return parts_of_shard(files, settings.shard, settings.num_shards)
    return parts_of_shard(files, 0, 1)


def _make_request(settings: BinarizeSettings, inputs: dict[str, list[Input]]) -> dict[str, Any]:
    """List all settings and checksums that the content of the folder depends on."""
    return {
        "options": {k: v for k, v in vars(settings).items() if k not in _UNREQUESTED},
        "corpus": describe_format(settings.line_format),
        "files": settings.vocabulary.checksums(),
        "inputs": {split: combine_checksums(parts) for split, parts in inputs.items()},
        "packages": {name: version(name) for name in PACKAGES},
    }


def _count_dictionary(settings: BinarizeSettings) -> Dictionary:
    """Build the dictionary of the training text, the same as ``fairseq-preprocess`` builds."""
    inputs = [Input(part) for part in _find_parts(settings, "train")]
    counter = Counter[str]()
    with Pool(settings.workers, count_symbols, settings) as pool:
        for chunk, (counts, invalid) in pool.map(read_chunks(inputs)):
            skip_or_refuse(invalid, inputs, chunk, settings.skips_invalid)
            counter.update(counts)
    dictionary = Dictionary()
    for symbol, count in sorted(counter.items()):
        dictionary.add_symbol(symbol, count)
    dictionary.finalize(settings.min_count, settings.max_symbols, _PADDING_FACTOR)
    return dictionary
