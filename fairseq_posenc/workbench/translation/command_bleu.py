"""``fairseq-posenc bleu``: evaluates translation models on a test set."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from fairseq_posenc.errors import UserError
from fairseq_posenc.folders import lock_folder
from fairseq_posenc.tokens.files import read_lines
from fairseq_posenc.workbench.results.record import Record, Row, own_command
from fairseq_posenc.workbench.running import options
from fairseq_posenc.workbench.running.devices import ComputeOptions
from fairseq_posenc.workbench.running.exit_codes import signals_as_keyboard_interrupt
from fairseq_posenc.workbench.running.progress import say
from fairseq_posenc.workbench.translation import scores
from fairseq_posenc.workbench.translation.command_translate import add_model_arguments
from fairseq_posenc.workbench.translation.report import (
    FIGURES,
    REPORT,
    compute_means,
    write_report,
)
from fairseq_posenc.workbench.translation.systems import (
    Contender,
    Search,
    SourceText,
    open_data_bin,
    parse_systems,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add = parser.add_argument
    text = (
        "a checkpoint (':' joins several to an ensemble), or a folder of checkpoints with "
        "--average; commas join trainings of one model with different seeds; the other systems "
        "are compared with the first"
    )
    add("systems", nargs="+", metavar="NAME=PATH[,PATH...]", help=text)
    options.add_out(parser, "bleu")
    text = (
        "text of the test set in the {} language, may be gzipped (default: {} in the data folder)"
    )
    for name, language in (("source", "source"), ("reference", "target")):
        default = f"SPLIT.raw.{language.upper()}"
        add(f"--{name}", type=Path, metavar="FILE", help=text.format(language, default))
    add_model_arguments(parser)  # --beam and --lenpen are among them
    add("--split", default="test", help="split of the data (default: %(default)s)")
    options.add_computing(parser)
    options.add_count(parser, "--average", "average the checkpoints of the last N epochs")
    options.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Evaluate and report; return the exit code.

    Raises:
        UserError: wrong input.
    """
    compute = ComputeOptions.choose(args.device, args.fp16, args.bf16)
    trainings = parse_systems(args.systems, args.average)
    # Greedy search, too, for comparison.
    searches = [Search(beam, args.lenpen) for beam in sorted({1, args.beam})]
    data_bins = [open_data_bin(training, args.data) for training in trainings]
    if len({(data_bin.source, data_bin.target) for data_bin in data_bins}) > 1:
        raise UserError("the systems translate between different languages; evaluate them apart")
    source = args.source or data_bins[0].find_raw_text(args.split, data_bins[0].source, "--source")
    target = args.reference or data_bins[0].find_raw_text(
        args.split, data_bins[0].target, "--reference"
    )
    sources, references = read_lines(source, "--source"), read_lines(target, "--reference")
    if len(sources) != len(references):
        raise UserError(
            f"--source {source} has {len(sources)} sentences, but {target} has {len(references)}"
        )
    text = SourceText(source, sources, searches, compute)
    with signals_as_keyboard_interrupt(), lock_folder(args.out):
        translations = [
            text.translate(training, data_bin, args.out)
            for training, data_bin in zip(trainings, data_bins)
        ]
        pieces = data_bins[0].find_pieces(data_bins[0].target)
        tables, signatures = _score(args.out, trainings, translations, sources, references, pieces)
        facts = {
            "subset": args.split,
            "reference": str(target),
            "sentences": len(references),
            "baseline": trainings[0].name,
        }
        record = Record("bleu", tables, {**facts, **signatures}, command=own_command())
        report = write_report(record, args.out)
    print(record.text() if args.json else report)
    say(f"report: {args.out / REPORT}, figures: {args.out / FIGURES}")
    return 0


def _score(
    out: Path,
    trainings: Sequence[Contender],
    translations: Sequence[Mapping[Search, list[str]]],
    sources: Sequence[str],
    references: Sequence[str],
    pieces: Path,
) -> tuple[dict[str, list[Row]], dict[str, str]]:
    """Score the translations of all trainings; return the record's tables and signatures."""
    scorer = scores.Scorer(references, pieces)
    rows: list[Row] = []
    systems: dict[str, list[list[str]]] = {}  # translations of all trainings by the last search
    for training, found in zip(trainings, translations):
        systems.setdefault(training.name, []).append(list(found.values())[-1])
        name = {"system": training.name, "path": training.path, "training": training.number}
        for search, lines in found.items():
            file = search.text_file(training.folder(out))
            described = {**name, **search._asdict(), "hypotheses": str(file)}
            rows.append({**described, **scorer.score(lines)})
    differences, test_signatures = scores.compare(references, systems)
    tables = {
        "scores": rows,
        "means": compute_means(rows),
        "differences": differences,
        "lengths": scores.score_by_length(references, sources, systems),
    }
    signatures = {f"signature of {name}": text for name, text in scorer.signatures.items()}
    signatures |= {f"test signature of {name}": text for name, text in test_signatures.items()}
    return tables, signatures
