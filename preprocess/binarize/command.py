"""Makes data-bins, their shards, or only a dictionary; all programs for running text call it."""

from __future__ import annotations

import argparse
import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fairseq.data import Dictionary

from fairseq_posenc.checkpoints.dictionary import DICTIONARY, load_dictionary
from fairseq_posenc.errors import UserError
from fairseq_posenc.files import write_whole
from fairseq_posenc.workbench.running.executor import Slurm
from fairseq_posenc.workbench.running.exit_codes import signals_as_keyboard_interrupt
from fairseq_posenc.workbench.running.files import checksum, read_json
from fairseq_posenc.workbench.running.folders import MANIFEST, WholeFolder, read_progress
from fairseq_posenc.workbench.running.jobs import Job, ResultStep
from fairseq_posenc.workbench.running.progress import format_counts, say
from fairseq_posenc.workbench.tokens.symbols import SymbolEncoder, warn_of_unknown
from fairseq_posenc.workbench.tokens.tokenizer import SpecialSymbols

from .formats import LineFormat, check_format, describe_format
from .items import count_symbols, make_items, skip_or_refuse
from .options import BinarizeSettings
from .pool import Pool
from .shards import (
    Input,
    Part,
    check_coverage,
    combine_checksums,
    find_files,
    parts_of_shard,
    read_shards,
)
from .sources import Place, read_chunks
from .split import Split
from .store import delete_sizes
from .vocabulary import PACKAGES, save_dictionary

_FORMAT = 2  # version of manifest.json
_COUNTS_FILE = "counts.json"
_PADDING_FACTOR = 8  # dictionaries are padded to a multiple of it, as in fairseq
# Settings that do not change the content of a data-bin, or that stand elsewhere in its manifest.
_UNRECORDED = ("line_format", "inputs", "vocabulary", "out", "dict_only", "workers", "cluster")


def run(args: argparse.Namespace, line_format: LineFormat) -> None:
    """Make the data-bin or dictionary that the options of :func:`options.make_parser` describe.

    Only what is missing is made.

    Raises:
        UserError: the options or the input are wrong, or the folder has other settings.
    """
    settings = BinarizeSettings.from_args(args, line_format)
    with signals_as_keyboard_interrupt():
        if settings.cluster:
            Binarizer(settings).make_on(settings.cluster)
        else:
            Binarizer(settings).make()


@dataclass(frozen=True)
class Binarizer:
    """Makes a data-bin, its shards, or only their dictionary; resumes interrupted calls."""

    settings: BinarizeSettings

    def _replace(self, **changes: Any) -> Binarizer:
        return Binarizer(replace(self.settings, **changes))

    def make(self) -> None:
        """Make a data-bin, a shard, or only their dictionary, in this process and its workers."""
        settings = self.settings
        if not settings.dict_only:
            self._write_folder()
        elif settings.num_shards > 1:
            self._write_counts()
        else:
            path = settings.out / DICTIONARY
            if path.exists():
                raise UserError(f"{path} is there already; delete it, or choose another --out")
            save_dictionary(self._count_dictionary(), path)
            say(f"wrote {path}")

    def make_on(self, cluster: Slurm) -> None:
        """Make all shards as jobs of a cluster; first count symbols if they need a dictionary."""
        settings = self.settings
        # So that jobs find the package `binarize`, which lies beside the programs.
        programs = str(Path(__file__).parents[1])
        inherited = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [programs, inherited]))
        vocabulary = settings.vocabulary
        if settings.makes_dictionary:
            counter: Counter[str] = Counter()
            for folder in self._replace(dict_only=True)._make_shards(cluster):
                counter.update(read_json(folder / _COUNTS_FILE))
            path = settings.out / DICTIONARY
            save_dictionary(self._build_dictionary(counter), path)
            vocabulary = vocabulary._replace(dict_txt=path)
        if not settings.dict_only:
            self._replace(vocabulary=vocabulary)._make_shards(cluster)

    def _make_shards(self, cluster: Slurm) -> list[Path]:
        """Make the missing shards, each in a job; return the folders of all shards."""
        settings = self.settings
        plan = self._plan({})  # without inputs, which `check_coverage` compares
        files = find_files(settings.inputs["train"])
        shards = [self._replace(shard=number) for number in range(settings.num_shards)]
        folders = [shard.settings.folder for shard in shards]
        # Shards with other settings are refused before any job starts.
        read_shards([folder for folder in folders if folder.exists()], plan)
        cluster.run([shard._build_job() for shard in shards], settings.out)
        check_coverage(read_shards(folders, plan), files)
        say(f"{len(shards)} shards in {folders[0].parent} have all of {len(files)} files, once")
        return folders

    def _build_job(self) -> Job:
        """Build the job that makes this binarizer's shard."""
        folder = self.settings.folder
        # Without inputs, as the manifest holds the plan, which `make` compares.
        step = ResultStep(
            folder, {}, lambda _: self.make(), lambda: read_progress(folder), result=MANIFEST
        )
        return Job(str(folder.relative_to(self.settings.out)), folder, (step,))

    def _write_counts(self) -> None:
        """Write the number of occurrences of each symbol in a shard."""
        inputs = self._find_inputs("train")
        folder = WholeFolder(self.settings.folder, self._plan({"train": inputs}))
        if folder.check_done():
            return
        with folder.create():
            counter = self._count_symbols(inputs)
            write_whole(folder.partial / _COUNTS_FILE, json.dumps(counter))
            parts = [{**part._asdict(), "sha256": digest} for part, digest in inputs]
            folder.finish({"splits": {"train": {"inputs": parts}}})

    def _write_folder(self) -> None:
        """Write the data-bin, or one shard of it."""
        settings = self.settings
        vocabulary = settings.vocabulary
        # fairseq reads valid and test only from the first shard.
        splits = [name for name in settings.inputs if name == "train" or settings.shard == 0]
        inputs = {split: self._find_inputs(split) for split in splits}
        folder = WholeFolder(settings.folder, self._plan(inputs))
        if folder.check_done():
            return
        # Loaded now, so that a broken dictionary is refused before anything is written.
        loaded = None if settings.makes_dictionary else vocabulary.load_dictionary()
        path = folder.partial / DICTIONARY
        with folder.resume() as done:
            if loaded is None:
                if not (path.exists() and done.get(DICTIONARY) == checksum(path)):
                    save_dictionary(self._count_dictionary(), path)
                    done[DICTIONARY] = checksum(path)
                    folder.save(done)
                dictionary = load_dictionary(path, mask=False)
            else:
                vocabulary.write_dictionary(loaded, path, folder.plan["files"])
                dictionary = loaded
            symbols = SpecialSymbols.from_dictionary(dictionary)
            tokenizer = vocabulary.load_encoder(dictionary)
            encoder = tokenizer or SymbolEncoder(settings.splitter, dictionary)
            with Pool(settings.workers, make_items, settings, encoder, symbols) as pool:
                for name in splits:
                    self._write_split(name, inputs[name], folder, symbols, pool, done)
            summary = {"symbols": len(dictionary), "sha256": checksum(path)}
            folder.finish({DICTIONARY: summary, "splits": {split: done[split] for split in splits}})

    def _write_split(
        self,
        name: str,
        inputs: list[Input],
        folder: WholeFolder,
        symbols: SpecialSymbols,
        pool: Pool,
        done: dict[str, Any],
    ) -> None:
        """Write a split unless it is done; ``done[name]`` is then its result."""
        if not Split.is_done(name, done):
            done[name] = Split(name, inputs, symbols, self.settings, folder, done).write(pool)
            folder.save(done)
        delete_sizes(folder.partial / name)
        counts = done[name]["counts"]
        print(f"{name}: {format_counts(counts)}")
        lines = counts["items"] - counts.get("cuts", 0)  # items with </s>: not all parts of a line
        words = counts["tokens"] - lines
        warn_of_unknown(name, counts["unknown_tokens"], words)
        if special := counts.get("special_tokens"):
            say(f"warning: {name} has {special:,} words that fairseq takes for <s>, </s> or <pad>")

    def _find_parts(self, split: str) -> list[Part]:
        """Find the parts of a split; only ``train`` is divided into shards."""
        settings = self.settings
        files = find_files(settings.inputs[split])
        check_format(settings.line_format, files)
        if split == "train":
            return parts_of_shard(files, settings.shard, settings.num_shards)
        return parts_of_shard(files, 0, 1)

    def _find_inputs(self, split: str) -> list[Input]:
        return list(map(Input.from_part, self._find_parts(split)))

    def _plan(self, inputs: dict[str, list[Input]]) -> dict[str, Any]:
        """List all settings and checksums that the content of the folder depends on."""
        settings = self.settings
        options = {name: value for name, value in vars(settings).items() if name not in _UNRECORDED}
        return {
            "format": _FORMAT,
            "options": options,
            "corpus": describe_format(settings.line_format),
            "files": settings.vocabulary.checksums(),
            "inputs": {split: combine_checksums(parts) for split, parts in inputs.items()},
            "packages": {name: version(name) for name in PACKAGES},
        }

    def _count_dictionary(self) -> Dictionary:
        """Build the dictionary by counting the whole training text in this process."""
        # without checksums, which only a manifest needs, and for which all text would be read twice
        inputs = [Input(part) for part in self._find_parts("train")]
        return self._build_dictionary(self._count_symbols(inputs))

    def _count_symbols(self, inputs: Sequence[Input]) -> Counter[str]:
        settings = self.settings
        counter = Counter[str]()
        with Pool(settings.workers, count_symbols, settings) as pool:
            for chunk, (counts, invalid) in pool.map(read_chunks(inputs, Place())):
                skip_or_refuse(invalid, inputs, chunk, settings.skips_invalid)
                counter.update(counts)
        return counter

    def _build_dictionary(self, counter: Counter[str]) -> Dictionary:
        """Build the dictionary of the training text, the same as ``fairseq-preprocess`` builds."""
        dictionary = Dictionary()
        for symbol, count in sorted(counter.items()):
            dictionary.add_symbol(symbol, count)
        dictionary.finalize(self.settings.min_count, self.settings.max_symbols, _PADDING_FACTOR)
        return dictionary
