"""Settings in, data-bin out: the work of the programs for running text."""

from __future__ import annotations

import argparse
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fairseq.data import Dictionary

from fairseq_posenc.checkpoints.dictionary import DICTIONARY, load_dictionary
from fairseq_posenc.errors import UserError
from fairseq_posenc.files import write_whole
from fairseq_posenc.workbench.running.executor import Slurm, run_jobs
from fairseq_posenc.workbench.running.exit_codes import signals_as_keyboard_interrupt
from fairseq_posenc.workbench.running.files import checksum, read_json
from fairseq_posenc.workbench.running.folders import MANIFEST, Folder, saved_progress
from fairseq_posenc.workbench.running.progress import format_counts, say
from fairseq_posenc.workbench.running.stages import Job
from fairseq_posenc.workbench.tokens.symbols import SymbolEncoder, warn_of_unknown
from fairseq_posenc.workbench.tokens.tokenizer import Symbols

from .coverage import check_coverage, read_shards
from .formats import LineFormat, check_format, describe_format
from .items import TextRules, check_invalid, count_symbols, make_items
from .options import BinarizeSettings
from .pool import Pool
from .shards import Part, find_files, parts_of_shard
from .sources import Input, Reader, combine_checksums
from .split import Split, SplitState
from .vocabulary import PACKAGES, save_dictionary

_FORMAT = 2  # version of manifest.json
_COUNTS = "counts.json"
_PADDING_FACTOR = 8  # of a dictionary's size, as in fairseq, for matrix hardware
# The numbers depend on these options, and on the files.
_OPTIONS = (
    *("words", "characters", "keep_spaces", "min_count", "max_symbols"),
    *("sentences", "empty_lines", "longest_line", "long_lines", "invalid_lines"),
    *("shard", "num_shards"),
)

WriteFolder = Callable[[BinarizeSettings, TextRules], None]  # makes the folder of a shard


def run(args: argparse.Namespace, lines: LineFormat) -> None:
    """Make the data-bin or dictionary of the options; continue where a call was interrupted.

    ``args`` are of :func:`options.make_parser`, ``lines`` is the format of the corpus.
    """
    settings = BinarizeSettings.from_args(args)
    text = TextRules(lines, settings.sentences, settings.empty_lines)
    with signals_as_keyboard_interrupt():
        if settings.cluster:
            _run_jobs(settings, text, settings.cluster)
        elif settings.dict_only and settings.num_shards > 1:
            _write_counts(settings, text)
        elif settings.dict_only:
            path = settings.out / DICTIONARY
            if path.exists():
                raise UserError(f"{path} is there already; delete it, or choose another --out")
            save_dictionary(_count_dictionary(settings, text), path)
            say(f"wrote {path}")
        else:
            _write_folder(settings, text)


def _run_jobs(settings: BinarizeSettings, text: TextRules, cluster: Slurm) -> None:
    """Make all shards as jobs of a cluster, and before them their dictionary, in the same way."""
    # There the modules are found as the program finds them, beside it.
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    settings = replace(settings, workers=int(cluster.options.get("cpus-per-task", 1)))
    if settings.makes_dictionary:
        counting, path = replace(settings, dict_only=True), settings.out / DICTIONARY
        counter: Counter[str] = Counter()
        for folder in _make_shards(counting, text, cluster, _write_counts):
            counter.update(read_json(folder / _COUNTS))
        save_dictionary(_build_dictionary(settings, counter), path)
        settings = replace(settings, vocabulary=settings.vocabulary._replace(dict_txt=path))
    if not settings.dict_only:
        _make_shards(settings, text, cluster, _write_folder)


def _make_shards(
    settings: BinarizeSettings, text: TextRules, cluster: Slurm, write: WriteFolder
) -> list[Path]:
    """Have ``write`` make all shards that are not there; return their folders, which are whole."""
    plan, files = _plan(settings, text, {}), find_files(settings.inputs["train"])
    shards = [replace(settings, shard=number) for number in range(settings.num_shards)]
    folders = [one.folder for one in shards]
    read_shards([folder for folder in folders if folder.exists()], plan)
    run_jobs([_build_job(one, text, write) for one in shards], settings.out, cluster)
    check_coverage(read_shards(folders, plan), files)
    say(f"{settings.num_shards} shards in {folders[0].parent} have all of {len(files)} files, once")
    return folders


def _build_job(settings: BinarizeSettings, text: TextRules, write: WriteFolder) -> Job:
    return Job(
        label=str(settings.folder.relative_to(settings.out)),
        folder=settings.folder,
        work=lambda place: write(settings, text),
        is_done=(settings.folder / MANIFEST).exists,
        progress=lambda: saved_progress(settings.folder),
    )


def _write_counts(settings: BinarizeSettings, text: TextRules) -> None:
    """Write how often each symbol occurs in a shard."""
    inputs = _find_inputs(settings, text)["train"]
    folder = Folder(settings.folder, _plan(settings, text, {"train": inputs}))
    if folder.is_done():
        return
    with folder.create():
        counter = _count_symbols(settings, text, [one.part for one in inputs])
        write_whole(folder.partial / _COUNTS, json.dumps(counter))
        described = {"inputs": [{**part._asdict(), "sha256": digest} for part, digest in inputs]}
        folder.finish({"splits": {"train": described}})


def _write_folder(settings: BinarizeSettings, text: TextRules) -> None:
    inputs = _find_inputs(settings, text)
    folder = Folder(settings.folder, _plan(settings, text, inputs))
    if folder.is_done():
        return
    vocabulary = settings.vocabulary
    # A broken one is refused before anything is written.
    given = None if settings.makes_dictionary else vocabulary.load_dictionary()
    with folder.resume() as done:
        if given is None:
            dictionary = _count_once(settings, text, folder, done)
        else:
            dictionary = given
            vocabulary.write_dictionary(given, folder.partial / DICTIONARY, folder.plan["files"])
        symbols = Symbols.from_dictionary(dictionary)
        tokenizer = vocabulary.load_encoder(dictionary)
        encoder = tokenizer or SymbolEncoder(settings.splitter, dictionary)
        with Pool(settings.workers, make_items, text, encoder, symbols, settings) as opened:
            for split in inputs:
                _write_split(split, inputs[split], settings, folder, symbols, opened, done)
        summary = {"symbols": len(dictionary), "sha256": checksum(folder.partial / DICTIONARY)}
        folder.finish({DICTIONARY: summary, "splits": {split: done[split] for split in inputs}})


def _write_split(
    name: str,
    inputs: list[Input],
    settings: BinarizeSettings,
    folder: Folder,
    symbols: Symbols,
    opened: Pool,
    done: dict[str, Any],
) -> None:
    """Write a split unless it is done; ``done`` holds results, and states of unfinished splits."""
    if "outputs" not in done.get(name, {}):

        def save(state: SplitState) -> None:
            folder.save({**done, name: vars(state)})
            say(f"{name}: {state.counts['tokens']:,} tokens")

        state = SplitState.from_json(done[name]) if name in done else SplitState()
        split = Split(folder.partial / name, inputs, symbols, settings, state, save)
        done[name] = split.write(opened)
        folder.save(done)
    (folder.partial / f"{name}.sizes").unlink(missing_ok=True)
    counts = done[name]["counts"]
    print(f"{name}: {format_counts(counts)}")
    warn_of_unknown(name, counts["unknown_tokens"], counts["tokens"] - counts["items"])
    if special := counts.get("special_tokens"):
        say(f"warning: {name} has {special:,} words that fairseq takes for <s>, </s> or <pad>")


def _find_inputs(settings: BinarizeSettings, text: TextRules) -> dict[str, list[Input]]:
    """Find the parts of each split; fairseq reads valid and test from the first shard alone."""
    inputs = {}
    for split, given in settings.inputs.items():
        shard, count = (settings.shard, settings.num_shards) if split == "train" else (0, 1)
        if split == "train" or settings.shard == 0:
            parts = _find_parts(given, text, shard, count)
            inputs[split] = list(map(Input.from_part, parts))
    return inputs


def _find_parts(given: Sequence[str], text: TextRules, shard: int, count: int) -> list[Part]:
    files = find_files(given)
    check_format(text.lines, files)
    return parts_of_shard(files, shard, count)


def _plan(
    settings: BinarizeSettings, text: TextRules, inputs: dict[str, list[Input]]
) -> dict[str, Any]:
    return {
        "format": _FORMAT,
        "options": {name: getattr(settings, name) for name in _OPTIONS},
        "corpus": describe_format(text.lines),
        "files": settings.vocabulary.checksums(),
        "inputs": {split: combine_checksums(given) for split, given in inputs.items()},
        "packages": {name: version(name) for name in PACKAGES},
    }


def _count_once(
    settings: BinarizeSettings, text: TextRules, folder: Folder, done: dict[str, Any]
) -> Dictionary:
    """Count the dictionary, or load it if ``done`` has the checksum of a counted one."""
    path = folder.partial / DICTIONARY
    if not (path.exists() and done.get(DICTIONARY) == checksum(path)):
        save_dictionary(_count_dictionary(settings, text), path)
        done[DICTIONARY] = checksum(path)
        folder.save(done)
    return load_dictionary(path, mask=False)


def _count_dictionary(settings: BinarizeSettings, text: TextRules) -> Dictionary:
    """Build the dictionary of the whole training text, counted here."""
    parts = _find_parts(settings.inputs["train"], text, 0, 1)
    return _build_dictionary(settings, _count_symbols(settings, text, parts))


def _count_symbols(
    settings: BinarizeSettings, text: TextRules, parts: Sequence[Part]
) -> Counter[str]:
    counter: Counter[str] = Counter()
    with Pool(settings.workers, count_symbols, text, settings.splitter) as opened:
        for (part, line), (counts, read) in opened.map(_read_chunks(parts)):
            check_invalid(read.invalid, part, line, settings.skips_invalid)
            counter.update(counts)
    return counter


def _build_dictionary(settings: BinarizeSettings, counter: Counter[str]) -> Dictionary:
    """Build the dictionary of the training text, equal to that of ``fairseq-preprocess``."""
    dictionary = Dictionary()
    for symbol, count in sorted(counter.items()):
        dictionary.add_symbol(symbol, count)
    dictionary.finalize(settings.min_count, settings.max_symbols, _PADDING_FACTOR)
    return dictionary


def _read_chunks(parts: Sequence[Part]) -> Iterator[tuple[tuple[Part, int], bytes]]:
    """Yield the chunks of several parts, each with its part and the lines before it."""
    for part in parts:
        line = 0
        for chunk in Reader(part):
            yield (part, line), chunk.data
            line += chunk.lines
