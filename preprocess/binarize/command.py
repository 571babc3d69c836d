"""What the programs do: options in, data-bin out."""

from __future__ import annotations

import argparse
import hashlib
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fairseq.data import Dictionary

from fairseq_posenc.errors import UserError
from fairseq_posenc.running.files import checksum, written_whole
from fairseq_posenc.running.folders import Folder
from fairseq_posenc.running.interruption import CONTINUES, any_end_like_ctrl_c
from fairseq_posenc.running.progress import format_counts, say
from fairseq_posenc.tokens.numbers import Encoder, Symbols, load_dictionary
from fairseq_posenc.tokens.symbols import Characters, Splitter, SymbolEncoder, words

from . import options, vocabulary
from .dictionary import build_dictionary
from .formats import LineFormat, check_format
from .items import Numbers, Text, make_items
from .pool import Pool, pool
from .shards import Part, find_files, parts_of_shard
from .sources import Input
from .split import Split, State

_FORMAT = 2  # of manifest.json
# What the numbers depend on, apart from the files.
_OPTIONS = (
    *("words", "characters", "keep_spaces", "min_count", "max_symbols"),
    *("sentences", "empty_lines", "longest_line", "long_lines", "invalid_lines"),
    *("shard", "num_shards"),
)


def run(args: argparse.Namespace, lines: LineFormat) -> None:
    """Make what the options ask for, going on where an earlier call was interrupted.

    Args:
        args: of :func:`options.make_parser`.
        lines: what a line of the corpus holds.
    """
    options.check(args)
    text = Text(lines, args.sentences, args.empty_lines)
    with any_end_like_ctrl_c(CONTINUES):
        if args.dict_only:
            _write_dictionary(args, text)
        else:
            _write_folder(args, text)


def _write_dictionary(args: argparse.Namespace, text: Text) -> None:
    path = args.out / "dict.txt"
    if path.exists():
        raise UserError(f"{path} is there already; delete it, or choose another --out")
    _save(_new_dictionary(args, text), path)
    say(f"wrote {path}")


def _write_folder(args: argparse.Namespace, text: Text) -> None:
    inputs = _inputs(args)
    check_format(text.lines, [one.part.path for given in inputs.values() for one in given])
    path = args.out
    if args.num_shards > 1:
        # The name tells how many there are, so that some of them do not pass for all.
        number = f"{args.shard:0{len(str(args.num_shards - 1))}d}"
        path = args.out / f"shard{number}-of-{args.num_shards}"
    folder = Folder(path, _plan(args, text, inputs))
    if folder.is_done():
        return
    with folder.continued() as done:
        dictionary = _dictionary(args, text, folder.partial / "dict.txt")
        numbers = Numbers(
            _encoder(args, dictionary), Symbols.of(dictionary), args.longest_line, args.long_lines
        )
        with pool(args.workers, make_items, text, numbers) as opened:
            for split in inputs:
                _write_split(split, inputs[split], args, folder, numbers.symbols, opened, done)
        summary = {"symbols": len(dictionary), "sha256": checksum(folder.partial / "dict.txt")}
        folder.finish({"dict.txt": summary, "splits": {split: done[split] for split in inputs}})


def _write_split(
    name: str,
    inputs: list[Input],
    args: argparse.Namespace,
    folder: Folder,
    symbols: Symbols,
    opened: Pool,
    done: dict[str, Any],
) -> None:
    """Write a split that is not done yet; ``done`` holds results, and states of unfinished ones."""
    if "outputs" not in done.get(name, {}):

        def save(state: State) -> None:
            folder.save({**done, name: state.to_json()})
            say(f"{name}: {state.counts['tokens']:,} tokens")

        documents, skip = args.empty_lines == "documents", args.invalid_lines == "skip"
        state = State.of(done[name]) if name in done else State()
        prefix = folder.partial / name
        done[name] = Split(prefix, inputs, symbols, documents, skip, state, save).write(opened)
        folder.save(done)
    (folder.partial / f"{name}.sizes").unlink(missing_ok=True)
    _report(name, done[name]["counts"])


def _report(name: str, counts: dict[str, int]) -> None:
    print(f"{name}: {format_counts(counts)}")
    if counts.get("special_tokens"):
        say(
            f"warning: {name} has {counts['special_tokens']:,} words that fairseq takes for <s>, "
            "</s> or <pad>"
        )


def _inputs(args: argparse.Namespace) -> dict[str, list[Input]]:
    """Return what each split is made of; fairseq reads valid and test in the first shard alone."""
    found: dict[str, list[Part]] = {}
    for split in options.SPLITS:
        if not (inputs := getattr(args, split)):
            continue
        if split == "train":
            found[split] = parts_of_shard(find_files(inputs), args.shard, args.num_shards)
        elif args.shard == 0:
            found[split] = parts_of_shard(find_files(inputs), 0, 1)
    return {split: list(map(Input.of, parts)) for split, parts in found.items()}


def _plan(args: argparse.Namespace, text: Text, inputs: dict[str, list[Input]]) -> dict[str, Any]:
    sums = {split: " ".join(one.sha256 for one in given) for split, given in inputs.items()}
    return {
        "format": _FORMAT,
        "options": {name: getattr(args, name) for name in _OPTIONS},
        "corpus": getattr(text.lines, "__name__", None) or repr(text.lines),
        "files": vocabulary.checksums(args),
        "inputs": {s: hashlib.sha256(each.encode()).hexdigest() for s, each in sums.items()},
        "packages": {name: version(name) for name in vocabulary.PACKAGES},
    }


def _dictionary(args: argparse.Namespace, text: Text, path: Path) -> Dictionary:
    """Return the dictionary, and write it if it is not there from an earlier call."""
    if not path.exists():
        if args.dict or args.sentencepiece_model:
            dictionary = vocabulary.dictionary(args)
        else:
            dictionary = _new_dictionary(args, text)
        _save(dictionary, path)
    return load_dictionary(path)


def _save(dictionary: Dictionary, path: Path) -> None:
    with written_whole(path) as temporary:
        dictionary.save(str(temporary))


def _new_dictionary(args: argparse.Namespace, text: Text) -> Dictionary:
    return build_dictionary(
        parts_of_shard(find_files(args.train), 0, 1),
        text,
        _splitter(args),
        args.workers,
        min_count=args.min_count,
        max_symbols=args.max_symbols,
        skip_invalid=args.invalid_lines == "skip",
    )


def _splitter(args: argparse.Namespace) -> Splitter:
    return Characters(args.keep_spaces) if args.characters else words


def _encoder(args: argparse.Namespace, dictionary: Dictionary) -> Encoder:
    if args.encoder_json or args.sentencepiece_model:
        return vocabulary.encoder(args, dictionary)
    return SymbolEncoder(_splitter(args), dictionary)
