"""The report of successive halving: the ranking, what could not be told apart, the command."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from fairseq_posenc.workbench.experiments.aggregate import Judged, order
from fairseq_posenc.workbench.experiments.choose.halving import Round
from fairseq_posenc.workbench.experiments.settings import CAUSAL, Settings
from fairseq_posenc.workbench.results import markdown
from fairseq_posenc.workbench.results.intervals import NOTE
from fairseq_posenc.workbench.results.record import Record, own_command
from fairseq_posenc.workbench.running.progress import format_time

REPORT, RECORD = "choose.md", "choose.json"
_RECIPES = {CAUSAL: "b_lm"}  # of the papers' trainings, the one for a family; else a_small


def last_of_each(rounds: Sequence[Round]) -> Iterator[tuple[Round, Judged]]:
    """Yield each candidate with its last round, from the best on."""
    seen = set()
    for each in reversed(rounds):
        for model in each.models:
            if model.contender not in seen:
                seen.add(model.contender)
                yield each, model


def told(rounds: Sequence[Round], settings: Settings) -> str:
    """Return the ranking, what each round could not tell apart, and what to do next."""
    rows = [
        (f"`{model.contender.name}`", f"{each.updates:,}", model.shown(2))
        for each, model in last_of_each(rounds)
    ]
    sentences = [
        f"- After {each.updates:,} updates: {' '.join(order(each.able))}"
        for each in rounds[1:] or rounds
        if len(settings.seeds) > 1
    ]
    if not sentences:
        sentences = ["- With one seed nothing is told apart; use `--seeds 1,2,3`."]
    seconds = sum(each.seconds for each in rounds)
    return "\n".join(
        [
            markdown.table(("encoding", "updates", "validation perplexity"), rows),
            "",
            *sentences,
            f"- It took {format_time(seconds)}. Perplexity is that of the mean loss over "
            f"{len(settings.seeds)} seeds, with its interval ({NOTE}).",
            "",
            "The real training, on data made by `fairseq-posenc preprocess`:",
            "",
            f"    {real_training(rounds, settings)}",
        ]
    )


def real_training(rounds: Sequence[Round], settings: Settings) -> str:
    """Return the command of a whole training with the best candidate."""
    _, best = next(last_of_each(rounds))
    recipe = _RECIPES.get(settings.family, "a_small")
    spec, directions = best.contender[1:]
    options = ["--tokens-per-sample", str(settings.trained)]
    options += ["--attention-directions", directions] if directions else []
    return f"fairseq-posenc train {recipe} {shlex.quote(spec)} DATA-BIN -- {shlex.join(options)}"


def record(rounds: Sequence[Round], settings: Settings) -> Record:
    """Return the figures of all candidates in all rounds, the last round first."""
    rows = [
        {
            "model": model.contender.name,
            "position_encoding": model.contender.position_encoding,
            "updates": each.updates,
            "seeds": len(settings.seeds),
            **model.perplexity.figures("perplexity"),
        }
        for each in reversed(rounds)
        for model in each.models
    ]
    times = [{"updates": each.updates, "seconds": each.seconds} for each in rounds]
    data = {
        "family": settings.family,
        "text": str(settings.text),
        "trained_length": settings.trained,
        "read_length": settings.read or settings.trained,
    }
    return Record("choose", {"candidates": rows, "rounds": times}, data, command=own_command())
