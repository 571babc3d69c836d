"""``fairseq-posenc squad``: fine-tunes on SQuAD, predicts answers, and scores them.

In SQuAD 1.1 every question has an answer. In 2.0 a model may also predict no answer, by odds: its
score of no answer minus that of its best answer, so above 0 it prefers no answer.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from fairseq_posenc.checkpoints.recovery import LAST
from fairseq_posenc.errors import UserError
from fairseq_posenc.files import write_whole
from fairseq_posenc.folders import lock_folder
from fairseq_posenc.tokens.squad_file import (
    V2,
    Squad,
    read_odds,
    read_predictions,
    read_squad,
)
from fairseq_posenc.workbench.examples import EXAMPLES
from fairseq_posenc.workbench.finetuning.recipes import format_override
from fairseq_posenc.workbench.finetuning.squad.predict import Predictor
from fairseq_posenc.workbench.finetuning.squad.score import Figures, evaluate, unanswered
from fairseq_posenc.workbench.finetuning.squad.train import fine_tune
from fairseq_posenc.workbench.results.record import Record, own_command
from fairseq_posenc.workbench.running.devices import ComputeOptions
from fairseq_posenc.workbench.running.exit_codes import signals_as_keyboard_interrupt
from fairseq_posenc.workbench.running.options import (
    add_computing,
    add_count,
    add_data,
    add_examples,
    add_out,
    add_set,
    finite_number,
)
from fairseq_posenc.workbench.running.progress import say


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands and their options."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, (description, add_options, run_action) in ACTIONS.items():
        subparser = actions.add_parser(name, help=description, description=description)
        add_options(subparser)
        add_examples(subparser, EXAMPLES[f"squad {name}"])
        subparser.set_defaults(run_action=run_action)


def run(args: argparse.Namespace) -> int:
    """Run a subcommand; return the exit code.

    Raises:
        UserError: wrong input.
    """
    return int(args.run_action(args))


def _add_train(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--checkpoint", type=Path, required=True, metavar="FILE", help="the pre-trained model")
    add_data(parser, "directory made by fairseq-posenc preprocess squad", required=True)
    add_out(parser)
    add_set(parser, "optimization.lr=[2e-5]")


def _add_predict(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--checkpoint", type=Path, required=True, metavar="FILE", help="the fine-tuned model")
    add("--questions", type=Path, required=True, metavar="JSON", help="SQuAD file")
    text = "directory made by fairseq-posenc preprocess squad (default: that of the training)"
    add_data(parser, text)
    add_out(parser)
    add_count(parser, "--max-tokens", "maximum tokens of a batch", 8192)
    add_computing(parser)


def _add_score(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("data", type=Path, metavar="DATA.json", help="SQuAD file with answers")
    add("predictions", type=Path, metavar="PREDICTIONS.json", help="answers by id")
    add("--na-prob-file", type=Path, metavar="JSON", help="SQuAD 2.0: odds of no answer, by id")
    text = "SQuAD 2.0: predict no answer if the odds exceed this (default: 1)"
    add("--na-prob-thresh", type=finite_number, metavar="X", help=text)


def _train(args: argparse.Namespace) -> int:
    user_dir = format_override("common.user_dir", args.user_dir.resolve())
    overrides = [user_dir, *args.changes]
    with signals_as_keyboard_interrupt():
        fine_tune(args.checkpoint, args.data, args.out, overrides)
    model = args.out / LAST
    say(f"wrote {model}; next: fairseq-posenc squad predict --checkpoint {model} ...")
    return 0


def _predict(args: argparse.Namespace) -> int:
    """Answer the questions, and write and score the answers; return the exit code."""
    compute = ComputeOptions.choose(args.device, args.fp16, args.bf16)
    squad = read_squad(args.questions)
    predictor = Predictor.load(args.checkpoint, args.data, compute)
    if predictor.version != squad.version:
        say(
            f"note: the model was trained on SQuAD {predictor.version}, but the questions are from "
            f"SQuAD {squad.version}"
        )
    with lock_folder(args.out):
        predictions = predictor.predict(squad.questions, args.max_tokens)
        if cut := predictor.window_maker.questions_cut:
            say(f"{cut:,} questions were longer than the limit and were cut")
        may_abstain = squad.version == V2
        answers = {x.id: x.answer for x in predictions}
        odds = {x.id: x.null_odds for x in predictions} if may_abstain else None
        nbest = {x.id: x.rank(with_null=may_abstain) for x in predictions}
        _write_json(args.out / "nbest.json", nbest)
        if odds is None:
            _write_json(args.out / "predictions.json", answers)
        else:
            final = {key: "" if odds[key] > 0.0 else answer for key, answer in answers.items()}
            _write_json(args.out / "predictions.json", final)
            # Answers even where none is preferred: scoring finds the best threshold of the odds.
            _write_json(args.out / "answers.json", answers)
            _write_json(args.out / "null_odds.json", odds)
        if squad.answered:
            figures = evaluate(squad, answers, odds, threshold=0.0)
            # The folder names the model, because the file is checkpoint_last.pt.
            name = args.checkpoint.resolve().parent.name
            facts = {"name": name, "checkpoint": str(args.checkpoint)}
            facts |= {"questions": str(squad.path), "squad": squad.version}
            names = {"exact_match": "exact"}  # from SQuAD 1.1 to 2.0
            row = {names.get(name, name): value for name, value in figures.items()}
            row["total"] = len(squad.questions)
            command = own_command()
            record = Record("squad", {"scores": [row]}, facts, predictor.spec, command=command)
            record.write(args.out / "score.json")
            say(f"wrote {args.out / 'score.json'}")
            _print_figures(squad, figures)
    return 0


def _score(args: argparse.Namespace) -> int:
    if args.na_prob_file is None and args.na_prob_thresh is not None:
        raise UserError("--na-prob-thresh: needs --na-prob-file, whose odds it is compared with")
    squad = read_squad(args.data)
    predictions = read_predictions(args.predictions)
    odds = None if args.na_prob_file is None else read_odds(args.na_prob_file)
    threshold = 1.0 if args.na_prob_thresh is None else args.na_prob_thresh
    figures = evaluate(squad, predictions, odds, threshold)
    if missing := unanswered(squad, predictions):
        say(f"{len(missing):,} unanswered questions receive score 0; the first is {missing[0]}")
    _print_figures(squad, figures)
    return 0


def _print_figures(squad: Squad, figures: Figures) -> None:
    """Print the figures as the official script of the version does."""
    print(json.dumps(figures, indent=2 if squad.version == V2 else None))


def _write_json(path: Path, content: Any) -> None:
    write_whole(path, json.dumps(content, ensure_ascii=False) + "\n")
    say(f"wrote {path}")


# The subcommands by name: description, function that adds the options, function that runs it.
ACTIONS = {
    "train": ("fine-tune a pre-trained model, or continue", _add_train, _train),
    "predict": ("answer questions with a fine-tuned model", _add_predict, _predict),
    "score": ("print the official figures of predictions", _add_score, _score),
}
