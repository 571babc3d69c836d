"""``fairseq-posenc squad predict``: answers the questions of a file."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from fairseq_posenc.workbench.finetuning.squad.data import V2, Squad, read_squad
from fairseq_posenc.workbench.finetuning.squad.predict import Predictor
from fairseq_posenc.workbench.finetuning.squad.results import (
    build_record,
    print_figures,
    write_json,
)
from fairseq_posenc.workbench.finetuning.squad.score import evaluate
from fairseq_posenc.workbench.finetuning.squad.spans import Prediction
from fairseq_posenc.workbench.results.record import make_folder
from fairseq_posenc.workbench.running.devices import Computing
from fairseq_posenc.workbench.running.options import (
    add_computing,
    add_count,
    add_data,
    add_json,
    add_out,
)
from fairseq_posenc.workbench.running.progress import say


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``fairseq-posenc squad predict``."""
    add = parser.add_argument
    add("--checkpoint", type=Path, required=True, metavar="FILE", help="the fine-tuned model")
    add("--questions", type=Path, required=True, metavar="JSON", help="SQuAD file")
    add_data(parser, "folder made by preprocess/squad.py (default: the one of the training)")
    add_out(parser)
    add_count(parser, "--max-tokens", "maximum tokens of a batch", 8192)
    add_computing(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Answer the questions and write the files; return the exit code.

    Raises:
        UserError: wrong input.
    """
    how = Computing.chosen(args.device, args.fp16, args.bf16)
    squad = read_squad(args.questions)
    predictor = Predictor.load(args.checkpoint, args.data, how)
    if predictor.version != squad.version:
        say(f"note: a model of SQuAD {predictor.version} answers SQuAD {squad.version}")
    make_folder(args.out)
    predictions = predictor.predict(squad.questions, args.max_tokens)
    if cut := predictor.encoder.questions_cut:
        say(f"{cut:,} questions were longer than the limit and were cut")
    final = {
        each.id: each.final(0.0) if squad.version == V2 else each.answer for each in predictions
    }
    write_json(args.out / "predictions.json", final)
    write_json(args.out / "nbest.json", {each.id: _nbest(each, squad) for each in predictions})
    answers = {each.id: each.answer for each in predictions}
    odds = {each.id: each.null_odds for each in predictions} if squad.version == V2 else None
    if odds is not None:
        write_json(args.out / "answers.json", answers)
        write_json(args.out / "null_odds.json", odds)
    if squad.answered:
        figures = evaluate(squad, answers, odds, threshold=0.0)
        spec = str(predictor.model.encoder.sentence_encoder.assembly.spec)
        # Named by its folder, because its file is checkpoint_last.pt.
        name = args.checkpoint.resolve().parent.name
        found = build_record(squad, figures, name, args.checkpoint, spec)
        write_json(args.out / "score.json", found)
        if args.json:
            print(found.text())
        else:
            print_figures(squad, figures)
    return 0


def _nbest(prediction: Prediction, squad: Squad) -> list[dict[str, Any]]:
    return [each._asdict() for each in prediction.ranked(with_null=squad.version == V2)]
