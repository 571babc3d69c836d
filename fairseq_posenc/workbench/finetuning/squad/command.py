"""``fairseq-posenc squad``: fine-tunes on SQuAD, predicts answers, and scores them.

In SQuAD 1.1 every question has an answer; in 2.0 some have none. The odds of no answer are a
model's score of no answer minus that of its best one (``null_odds``): above 0 it prefers none.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf

from fairseq_posenc import folders
from fairseq_posenc.checkpoints.recovery import LAST, ensure_last_checkpoint
from fairseq_posenc.errors import UserError
from fairseq_posenc.files import write_whole
from fairseq_posenc.tasks.squad.databin import SquadDataBin, open_data_bin
from fairseq_posenc.tokens.squad_file import V2, Squad, read_by_id, read_squad
from fairseq_posenc.user_dir import find_shipped_folder
from fairseq_posenc.workbench.examples import add_examples
from fairseq_posenc.workbench.finetuning import recipes
from fairseq_posenc.workbench.finetuning.squad.predict import Predictor
from fairseq_posenc.workbench.finetuning.squad.score import Figures, evaluate, list_missing
from fairseq_posenc.workbench.loading.checkpoints import updates_done
from fairseq_posenc.workbench.loading.pretrained import Pretrained, read_pretrained
from fairseq_posenc.workbench.results.record import Record, own_command
from fairseq_posenc.workbench.running import devices, options
from fairseq_posenc.workbench.running.progress import say

# Encodings that diverged at the learning rate of the others in m4m's paper (arXiv:2109.12788).
_DIVERGED = {"raffel", "tupe"}
_COUNTS = ("optimization.max_update", "lr_scheduler.warmup_updates")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands and their options."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, (description, add_options, run_action) in ACTIONS.items():
        subparser = actions.add_parser(name, help=description, description=description)
        add_options(subparser)
        add_examples(subparser, f"squad {name}")
        subparser.set_defaults(run_action=run_action)


def run(args: argparse.Namespace) -> None:
    """Run a subcommand.

    Raises:
        UserError: wrong input.
    """
    args.run_action(args)


def _add_train(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--checkpoint", type=Path, required=True, metavar="FILE", help="the pre-trained model")
    options.add_data(parser, "folder made by fairseq-posenc preprocess squad", required=True)
    options.add_out(parser)
    recipes.add_set(parser, example="optimization.lr=[2e-5]")


def _add_predict(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--checkpoint", type=Path, required=True, metavar="FILE", help="the fine-tuned model")
    add("--questions", type=Path, required=True, metavar="JSON", help="SQuAD file")
    text = "folder made by fairseq-posenc preprocess squad (default: the one it was trained on)"
    options.add_data(parser, text)
    options.add_out(parser)
    options.add_count(parser, "--max-tokens", "maximum number of tokens in a batch", 8192)
    options.add_precision(parser)


def _add_score(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("data", type=Path, metavar="DATA.json", help="SQuAD file with answers")
    add("predictions", type=Path, metavar="PREDICTIONS.json", help="answers by id")
    add("--na-prob-file", type=Path, metavar="JSON", help="SQuAD 2.0: odds of no answer, by id")
    text = "SQuAD 2.0: predict no answer if the odds exceed this (default: 1)"
    add("--na-prob-thresh", type=options.finite_number, metavar="X", help=text)


def _train(args: argparse.Namespace) -> None:
    """Train, or continue; ``args.changes`` is from ``--set``, ``user_dir`` from ``cli``."""
    out: Path = args.out
    changes = [recipes.format_override("common.user_dir", args.user_dir.resolve()), *args.changes]
    pretrained = read_pretrained(args.checkpoint)
    cfg, command = compose_training(pretrained, open_data_bin(args.data), out, changes)
    updates = cfg.optimization.max_update
    request = cast("dict[str, Any]", OmegaConf.to_container(cfg, enum_to_str=True))
    with folders.lock_folder(out) as lock:  # a descriptor, which the training program inherits
        ensure_last_checkpoint(out)  # a kill may have left it torn or missing
        done = updates_done(out)
        folders.claim(out, request, has_results=done > 0)  # refuses the folder of another request
        if done >= updates:
            say(f"{out}: the training is finished, and nothing was changed")
        else:  # reports the loss of each validation
            recipes.train(command, out, lock, label=str(out), updates=updates, metric="loss")
    say(f"next: fairseq-posenc squad predict --checkpoint {quote(str(out / LAST))} ...")


def compose_training(
    pretrained: Pretrained, data_bin: SquadDataBin, out: Path, changes: Sequence[str]
) -> tuple[DictConfig, list[str]]:
    """Compose a training run; return its configuration and its command.

    Args:
        pretrained: the model to start from.
        data_bin: the data; ``train_windows`` is the number of its training examples.
        out: folder of the results.
        changes: hydra's overrides of the recipe; the user's come last, so they win.

    Raises:
        UserError: an override cannot be read, or sizes do not fit.
    """
    pretrained.check_dictionary(data_bin.dictionary)
    data_bin.check_lengths(pretrained.max_positions, pretrained.path)
    version = data_bin.version.replace(".", "")  # 11 or 20
    path = find_shipped_folder("finetune_configs") / f"squad{version}.yaml"
    if pretrained.spec.names & _DIVERGED:
        changes = ["optimization.lr=[2.5e-05]", *changes]  # their own rate
    values = {"task.data": data_bin.path.resolve(), "checkpoint.save_dir": out.resolve()}
    # Values by name, as texts: the model's options, `values` and `changes`, of which the last wins.
    settings = recipes.build_settings(pretrained, values, changes)
    cfg = recipes.compose_recipe(path, data_bin.train_windows, recipes.join_overrides(settings))
    # The file leaves these two open; unless set, they were computed from the number of examples.
    counts = {name: str(OmegaConf.select(cfg, name)) for name in _COUNTS}
    return cfg, recipes.build_command(path, settings | counts)


def _predict(args: argparse.Namespace) -> None:
    """Answer the questions, and write and score the answers."""
    dtype = devices.choose_dtype(args.fp16, args.bf16)
    squad = read_squad(args.questions)
    predictor = Predictor.load(args.checkpoint, args.data, dtype)
    with folders.lock_folder(args.out):
        predictions = predictor.predict(squad.questions, args.max_tokens)
        for name in ("answers.json", "null_odds.json", "score.json"):  # of an earlier call
            (args.out / name).unlink(missing_ok=True)
        answers = {x.id: x.answer for x in predictions}
        odds = {x.id: x.null_odds for x in predictions} if squad.version == V2 else None
        preferred = {x.id: "" if odds and x.null_odds > 0.0 else x.answer for x in predictions}
        _write_json(args.out / "predictions.json", preferred)
        if odds is not None:
            # Also for questions left unanswered above, as scoring finds the best threshold.
            _write_json(args.out / "answers.json", answers)
            _write_json(args.out / "null_odds.json", odds)
        if squad.answered:  # test sets are not
            figures = evaluate(squad, answers, odds, threshold=0.0)
            # Named by the folder: the file is mostly called checkpoint_last.pt.
            facts = {"name": args.checkpoint.resolve().parent.name, "squad": squad.version}
            facts |= {"checkpoint": str(args.checkpoint), "questions": str(squad.path)}
            # The record names figures as SQuAD 2.0's script does, also those of 1.1.
            row = {name.replace("exact_match", "exact"): x for name, x in figures.items()}
            tables = {"scores": [{**row, "total": len(squad.questions)}]}
            record = Record("squad", tables, facts, predictor.spec, command=own_command())
            record.write(args.out / "score.json")
            say(f"wrote {args.out / 'score.json'}")
            _print_figures(squad, figures)


def _score(args: argparse.Namespace) -> None:
    if args.na_prob_file is None and args.na_prob_thresh is not None:
        raise UserError("--na-prob-thresh: needs --na-prob-file, whose odds it is compared with")
    squad = read_squad(args.data)
    predictions = read_by_id(args.predictions, str)
    odds = None if args.na_prob_file is None else read_by_id(args.na_prob_file, float)
    threshold = 1.0 if args.na_prob_thresh is None else args.na_prob_thresh  # official default
    figures = evaluate(squad, predictions, odds, threshold)
    if missing := list_missing(squad, predictions):
        say(f"unanswered questions get score 0: {len(missing):,}; the first is {missing[0]}")
    _print_figures(squad, figures)


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
