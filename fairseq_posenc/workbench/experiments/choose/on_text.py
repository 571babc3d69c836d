"""Chooses an encoding by training candidates on a text, by successive halving.

The report has the ranking, the significant differences and the command of a full training.
"""

from __future__ import annotations

import argparse
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Optional

from fairseq_posenc.errors import UserError
from fairseq_posenc.files import write_whole
from fairseq_posenc.workbench.experiments.choose.answer import ChooseQuestion, choose_candidates
from fairseq_posenc.workbench.experiments.choose.halving import Halving, Round
from fairseq_posenc.workbench.experiments.corpus import check_text
from fairseq_posenc.workbench.experiments.experiment import RESERVED
from fairseq_posenc.workbench.experiments.outcomes import SeedAggregate
from fairseq_posenc.workbench.experiments.ranks import describe_ranks
from fairseq_posenc.workbench.experiments.text_experiment import LEARNING_RATE, TextExperiment
from fairseq_posenc.workbench.experiments.variants import CAUSAL, MASKED, Variant, parse_variants
from fairseq_posenc.workbench.results import differences, intervals, markdown
from fairseq_posenc.workbench.results.record import Record, own_command
from fairseq_posenc.workbench.running.exit_codes import signals_as_keyboard_interrupt
from fairseq_posenc.workbench.running.folders import lock_output_folder
from fairseq_posenc.workbench.running.progress import format_time, say

REPORT, RECORD = "choose.md", "choose.json"
_RECIPES = {MASKED: "a_small", CAUSAL: "b_lm"}  # recipe of a full training, by family
_UNITS = {"s": 1, "m": 60, "h": 3600}  # in seconds
_TIME = re.compile(r"(\d+)([smh])")


class Candidates(TextExperiment):
    """Language models whose length and number of updates follow from the command's options."""

    reserved: ClassVar[Mapping[str, str]] = {
        **RESERVED,
        "--lr": f"all candidates have {LEARNING_RATE}",
        "--max-update": "use --budget",
        "--max-epoch": "use --budget",
        "--tokens-per-sample": "use --trained",
    }


def train_candidates(question: ChooseQuestion, args: argparse.Namespace) -> tuple[Record, str]:
    """Train candidates, and write a report and a record; return the record and the report's text.

    Raises:
        UserError: wrong input, or a command of fairseq failed.
    """
    experiment = _build_experiment(question, args)
    budget = _parse_seconds(args.budget)
    check_text(args.text)  # so that an unusable text is refused before anything is written
    with (
        signals_as_keyboard_interrupt(),
        lock_output_folder(experiment.out, (REPORT, RECORD)) as lock,
    ):
        candidates = ", ".join(experiment.names)
        limit = format_time(budget)
        say(f"{candidates} on {args.text} within {limit}; results: {experiment.out}/")
        halving = Halving(experiment, budget, lock)
        rounds = halving.run()
        answer = describe_rounds(rounds, experiment, halving.estimate_budget(rounds))
        record = build_record(rounds, experiment)
        record.write(experiment.out / RECORD)
        report = f"# Which encoding\n\n{answer}\n\n    {record.command}\n"
        write_whole(experiment.out / REPORT, report)
    say(f"report: {experiment.out / REPORT}")
    return record, answer


def _build_experiment(question: ChooseQuestion, args: argparse.Namespace) -> TextExperiment:
    listed = args.encodings or ",".join(choose_candidates(question))
    variants = parse_variants(listed)
    if len(variants) < 2:
        raise UserError(f"--encodings {listed}: name two or more candidates")
    return Candidates.from_args(
        args,
        out=args.out or Path(f"choose-{args.text.stem}"),
        variants=variants,
        updates=1,  # each round replaces it
        eval_length=question.length,
        points=2,  # few, because validations take time and the report has no learning curves
        # The user's options come first: the experiment checks the first word.
        train_args=(*args.after_dashes, "--tokens-per-sample", str(question.trained)),
    )


def _parse_seconds(text: str) -> float:
    match = _TIME.fullmatch(text.strip())
    if not match or not int(match[1]):
        raise UserError(f"--budget {text}: write a time, as in 90s, 30m or 2h")
    return float(int(match[1]) * _UNITS[match[2]])


def rank_candidates(rounds: Sequence[Round]) -> list[tuple[Round, SeedAggregate]]:
    """List each candidate's last round and its results there, the best first."""
    ranked: dict[Variant, tuple[Round, SeedAggregate]] = {}
    for round_ in reversed(rounds):
        for model in round_.models:
            ranked.setdefault(model.variant, (round_, model))
    return [*ranked.values()]


def describe_rounds(
    rounds: Sequence[Round], experiment: TextExperiment, budget: Optional[float] = None
) -> str:
    """Recommend a candidate, and describe the measurements and the significant differences.

    ``budget`` is the estimated number of seconds after which ranks mean something, if it is known.
    """
    rows = [
        (markdown.code(model.variant.name), f"{last_round.updates:,}", model.show(2))
        for last_round, model in rank_candidates(rounds)
    ]
    # The first of several rounds only measures the speed.
    sentences = [_describe_round(round_) for round_ in rounds[1:] or rounds]
    if too_few_seeds := differences.explain_few_seeds(len(experiment.seeds)):
        sentences = [too_few_seeds]
    seconds = format_time(sum(round_.seconds for round_ in rounds))
    return "\n".join(
        [
            _advise(rounds, experiment, budget),
            "",
            f"Measured: {experiment.family} models of {experiment.size('layers')} layers of width "
            f"{experiment.size('embed-dim')} on {markdown.code(str(experiment.text))}, trained at "
            f"{experiment.trained:,} tokens for up to {rounds[-1].updates:,} updates, read at "
            f"{experiment.read_length:,}, {len(experiment.seeds)} seeds.",
            "",
            markdown.table(("encoding", "updates", "validation perplexity"), rows),
            "",
            *(f"- {sentence}" for sentence in sentences),
            f"- It took {seconds}. Perplexity is computed from the mean loss over the seeds, with "
            f"an interval for three seeds or more ({intervals.INTERVAL_NOTE}). "
            f"{differences.TEST_NOTE}",
        ]
    )


def _describe_round(round_: Round) -> str:
    by_model = {model.variant.name: model.perplexity_by_seed for model in round_.comparable}
    sentences = " ".join(differences.describe_differences(by_model)) or "nothing to compare."
    return f"After {round_.updates:,} updates: {sentences}"


def _advise(rounds: Sequence[Round], experiment: TextExperiment, budget: Optional[float]) -> str:
    """Recommend the best candidate, with a command for a full training, if ranks mean something."""
    last = rounds[-1]
    best = last.models[0]
    meaning = describe_ranks(best.variant.name, best.perplexity.mean, last.updates, last.unigram)
    if not last.has_meaning:
        advice = f"No encoding is recommended. {meaning}"
        if budget is None:
            return advice
        return (
            f"{advice} At the speed of these trainings, {len(experiment.names)} encodings with "
            f"{len(experiment.seeds)} seeds need `--budget {format_budget(budget)}`; with it, the "
            "same command continues all of them. Fewer encodings or seeds need less."
        )
    variant = best.variant
    options = [f"task.tokens_per_sample={experiment.trained}"]
    if variant.directions:
        options.append(f"+model.attention_directions='{variant.directions}'")
    options.insert(0, f"model.position_encoding='{variant.position_encoding}'")
    command = f"train_scripts/{_RECIPES[experiment.family]}.sh task.data=DATA-BIN"
    return (
        f"Take {markdown.code(variant.name)} if fast learning matters most: after "
        f"{last.updates:,} updates it has the lowest perplexity, {best.show(2)}. Short trainings "
        "of small models do not show which encoding is best after a long training. "
        f"{meaning} A full training, on data made by `fairseq-posenc preprocess`:\n\n"
        f"    {command} {shlex.join(options)}"
    )


def format_budget(seconds: float) -> str:
    """Format a time for ``--budget``, rounded up to minutes, to five minutes or to hours."""
    minutes = math.ceil(seconds / 60)
    if minutes <= 10:
        return f"{minutes}m"
    if minutes <= 120:
        return f"{5 * math.ceil(minutes / 5)}m"
    return f"{math.ceil(minutes / 60)}h"


def build_record(rounds: Sequence[Round], experiment: TextExperiment) -> Record:
    """Build the record of all models in all rounds, the last round first."""
    rows = [
        {
            "model": model.variant.name,
            "position_encoding": model.variant.position_encoding,
            "updates": round_.updates,
            "seeds": len(experiment.seeds),
            **model.perplexity.figures("perplexity"),
        }
        for round_ in reversed(rounds)
        for model in round_.models
    ]
    times = [{"updates": round_.updates, "seconds": round_.seconds} for round_ in rounds]
    data = {
        "family": experiment.family,
        "text": str(experiment.text),
        "trained_length": experiment.trained,
        "read_length": experiment.read_length,
    }
    return Record("choose", {"candidates": rows, "rounds": times}, data, command=own_command())
