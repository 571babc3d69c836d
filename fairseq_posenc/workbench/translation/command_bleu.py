"""``fairseq-posenc bleu``: evaluates translation models on a test set.

A second call with the same ``--out`` translates only with the models that are new.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from fairseq_posenc.errors import UserError, counted
from fairseq_posenc.files import write_whole
from fairseq_posenc.folders import Request, checksum, lock_folder, read_result, write_result
from fairseq_posenc.tokens.files import read_lines
from fairseq_posenc.version import __version__
from fairseq_posenc.workbench.loading.open_model import OpenTask, open_task
from fairseq_posenc.workbench.results.record import Record, Row, own_command
from fairseq_posenc.workbench.running import devices, options
from fairseq_posenc.workbench.running.progress import say
from fairseq_posenc.workbench.translation import scores, translator
from fairseq_posenc.workbench.translation.command_translate import add_model_arguments

_REPORT, _FIGURES = "bleu.md", "bleu.json"


class SystemCheckpoint(NamedTuple):
    """A checkpoint of a system, which has one for each training run (seed)."""

    system: str  # name of the system in tables
    number: int  # number among the system's checkpoints, from 1
    path: Path  # the checkpoint
    label: str  # name in messages: the system's, with the number if it has several


class TranslationPlan(NamedTuple):
    """The source sentences of a test set, and how to translate them."""

    source_file: Path
    sentences: list[str]
    beam: int
    length_penalty: float
    dtype: torch.dtype  # precision of the model

    def translate(self, checkpoint: SystemCheckpoint, opened: OpenTask, out: Path) -> list[str]:
        """Translate with a checkpoint, whose task is ``opened``, unless ``out`` has the result.

        Raises:
            UserError: ``out`` has translations by another model, of another text or search.
        """
        request: Request = {  # all that the translations depend on
            "checkpoint": checksum(checkpoint.path),
            "pieces": checksum(translator.require_pieces(opened.data, opened.task.cfg.source_lang)),
            "source": checksum(self.source_file),
            "precision": str(self.dtype),
            "search": [self.beam, self.length_penalty],
            "version": __version__,
        }
        path = out / checkpoint.system / f"{checkpoint.number}.txt"  # for users; we read the .json
        if (result := read_result(path.with_suffix(".json"), request)) is None:  # not finished
            say(f"{checkpoint.label}: {counted(len(self.sentences), 'sentences')}")
            model = translator.Translator.load(checkpoint.path, opened.data, self.dtype)
            translator.warn_of_long(self.sentences, model)
            found = model.translate(self.sentences, self.beam, length_penalty=self.length_penalty)
            result = {"translations": [best.text for (best,) in found]}
            path.parent.mkdir(exist_ok=True)
            write_whole(path, "".join(f"{line}\n" for line in result["translations"]))
            write_result(path.with_suffix(".json"), request, result)
        return list(result["translations"])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add = parser.add_argument
    text = "checkpoints (commas separate a model's seeds); the first is compared with the others"
    add("systems", nargs="+", metavar="NAME=PATH[,PATH...]", help=text)
    options.add_out(parser, "bleu")
    text = "text of the test set in the {} language, may be gzipped (default: {} in the data)"
    for name, language in (("source", "source"), ("reference", "target")):
        default = f"SPLIT.raw.{language.upper()}"
        add(f"--{name}", type=Path, metavar="FILE", help=text.format(language, default))
    add_model_arguments(parser)  # --beam and --lenpen are among them
    add("--split", default="test", help="split of the data (default: %(default)s)")
    options.add_precision(parser)


def run(args: argparse.Namespace) -> None:
    """Evaluate and report.

    Raises:
        UserError: wrong input.
    """
    dtype = devices.choose_dtype(args.fp16, args.bf16)
    checkpoints = parse_systems(args.systems)
    # All are opened first, so that mistakes show early. A generator: not all are in memory at once.
    states = (translator.load_translation(x.path, f"{x.label}:") for x in checkpoints)
    tasks = [open_task(x.path, state, args.data) for x, state in zip(checkpoints, states)]
    languages = [(x.task.cfg.source_lang, x.task.cfg.target_lang) for x in tasks]
    if len(set(languages)) > 1:
        raise UserError("the systems are for different languages; evaluate them separately")
    in_data = [tasks[0].data / f"{args.split}.raw.{language}" for language in languages[0]]
    source_file, target_file = args.source or in_data[0], args.reference or in_data[1]
    split = f"--split {args.split}:"  # in messages
    sentences = read_lines(source_file, "--source" if args.source else split)
    references = read_lines(target_file, "--reference" if args.reference else split)
    if len(sentences) != len(references):
        count = counted(len(sentences), "sentences")
        raise UserError(f"{source_file} has {count}, but {target_file} has {len(references):,}")
    plan = TranslationPlan(source_file, sentences, args.beam, args.lenpen, dtype)
    with lock_folder(args.out):
        translations = [plan.translate(x, task, args.out) for x, task in zip(checkpoints, tasks)]
        facts = {"subset": args.split, "reference": str(target_file), "sentences": len(references)}
        record = _score(checkpoints, translations, plan, references, facts)
        report = scores.format_report(record)
        record.write(args.out / _FIGURES)
        write_whole(args.out / _REPORT, report)
    print(report)
    say(f"report: {args.out / _REPORT}, figures: {args.out / _FIGURES}")


def _score(
    checkpoints: Sequence[SystemCheckpoint],
    translations: Sequence[list[str]],  # by each checkpoint
    plan: TranslationPlan,
    references: Sequence[str],
    facts: Mapping[str, object],
) -> Record:
    """Score the translations of all checkpoints; return the record, with ``facts`` in its data."""
    metrics = scores.build_metrics(references)
    signatures = {f"signature of {name}": str(x.get_signature()) for name, x in metrics.items()}
    rows: list[Row] = []
    systems: dict[str, list[list[str]]] = {}
    for (system, number, path, _), lines in zip(checkpoints, translations):  # without the label
        systems.setdefault(system, []).append(lines)
        row = {"system": system, "training": number, "path": str(path)}
        row |= {"beam": plan.beam, "length_penalty": plan.length_penalty}
        # None in place of the references, which the metrics hold.
        row |= {name: metric.corpus_score(lines, None).score for name, metric in metrics.items()}
        rows.append(row)
    differences, test_signatures = scores.compare(references, systems)
    tables = {
        "scores": rows,
        "means": scores.compute_means(rows),
        "differences": differences,
        "lengths": scores.score_by_length(references, plan.sentences, systems),
    }
    signatures |= {f"test signature of {name}": text for name, text in test_signatures.items()}
    return Record("bleu", tables, {**facts, **signatures}, command=own_command())


def parse_systems(texts: Sequence[str]) -> list[SystemCheckpoint]:
    """Parse the systems of a command line, each ``NAME=PATH[,PATH...]``; list their checkpoints.

    Raises:
        UserError: a name is not valid for a folder or occurs twice, or one system has more
            checkpoints than another.
    """
    named = options.parse_named(texts, "NAME=PATH or NAME=PATH,PATH", _REPORT, _FIGURES)
    systems = {name: options.split_paths(paths, name) for name, paths in named.items()}
    if len(set(map(len, systems.values()))) > 1:
        listed = ", ".join(f"{name} has {len(paths)}" for name, paths in systems.items())
        raise UserError(f"name the same number of checkpoints for each system: {listed}")
    checkpoints = []
    for name, paths in systems.items():
        for number, path in enumerate(paths, start=1):
            label = f"{name}, checkpoint {number}" if len(paths) > 1 else name
            checkpoints.append(SystemCheckpoint(name, number, Path(path), label))
    return checkpoints
