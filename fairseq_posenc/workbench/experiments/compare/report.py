"""The report: table, picture, and what follows from the figures."""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import fmean

from fairseq_posenc.workbench.experiments.aggregate import Judged, Outcome
from fairseq_posenc.workbench.experiments.compare.reproduce import again, commands
from fairseq_posenc.workbench.experiments.compare.statements import statements
from fairseq_posenc.workbench.experiments.pipeline import Results
from fairseq_posenc.workbench.experiments.settings import CAUSAL, MASKED, Settings
from fairseq_posenc.workbench.results import markdown
from fairseq_posenc.workbench.results.intervals import NOTE
from fairseq_posenc.workbench.results.learning_curves import draw_lines
from fairseq_posenc.workbench.results.pictures import can_draw
from fairseq_posenc.workbench.results.record import Record, own_command
from fairseq_posenc.workbench.running.files import write_whole
from fairseq_posenc.workbench.running.progress import format_time, say

REPORT, PICTURE, RECORD = "report.md", "curves.png", "compare.json"


def write_report(results: Results) -> Path:
    """Write the report and, if matplotlib is installed, its picture; return the report's path."""
    out = results.settings.out
    drawn = False
    if can_draw():
        curves = {model.contender.name: model.curve for model in results.models}
        lines = {model.contender.name: _line(model) for model in results.models}
        bands = {name: [(x, y.low, y.high) for x, y in curve] for name, curve in curves.items()}
        title = f"Validation perplexity of the {_FAMILIES[results.settings.family]}"
        drawn = draw_lines(lines, title, out / PICTURE, log=True, bands=bands)
    else:
        say("no picture of the curves: matplotlib is not installed (pip install matplotlib)")
    parts = [
        "# Position encodings compared",
        _introduction(results),
        table(results.models),
        _note(results.settings),
        f"![Learning curves: validation perplexity over updates]({PICTURE})" if drawn else "",
        "## What follows from the figures",
        "\n".join(f"- {sentence}" for sentence in told(results)),
        _RULE,
        "## Run it again, or bigger",
        again(results.settings),
        "## The commands behind it",
        commands(results.settings),
    ]
    path = out / REPORT
    write_whole(path, "\n\n".join(part for part in parts if part) + "\n")
    return path


def told(results: Results) -> list[str]:
    """Return what follows from the figures, as sentences."""
    return statements(results.models, results.settings.family == MASKED)


def _line(model: Judged) -> list[tuple[int, float]]:
    """Return the mean curve, which ends without a number where a seed diverged first."""
    end = min(model.diverged.values(), default=0)
    return [*((x, y.mean) for x, y in model.curve), *([(end, math.nan)] if end else [])]


def _note(settings: Settings) -> str:
    masked = settings.family == MASKED
    return (
        f"Validation perplexity is `fairseq-validate`'s, of {'the masked' if masked else 'all'} "
        "tokens; lower is better. It is that of the mean loss over the seeds, with its interval "
        f"({NOTE}); the picture's bands are that too. "
        f"{'The masks of a seed are the same for every encoding. ' if masked else ''}"
        "Where there are several learning rates, a model is judged at the one with the lowest mean "
        "loss on this same text. Tokens per second is the median during training; time is that of "
        "a training with its validations, each on one thread: means over the seeds. Both are "
        "slower where the machine had other work meanwhile."
    )


_FAMILIES = {MASKED: "masked language model", CAUSAL: "causal language model"}
_RULE = (
    "These sentences are computed from the figures by fixed rules. One model is said to be below "
    "another only where their intervals do not overlap."
)


def _introduction(results: Results) -> str:
    settings, words = results.settings, results.text
    source = (
        f"`{settings.text}`"
        if settings.text
        else f"the documentation inside Python {platform.python_version()}"
    )
    return (
        f"{_FAMILIES[settings.family].capitalize()}s on real text: {source}, {words['words']:,} "
        f"words in {words['documents']:,} documents, of which {words['valid_words']:,} words are "
        f"kept for validation, cut into {settings.vocab_size:,} sentencepieces. The models have "
        f"{settings.size('layers')} layers of width "
        f"{settings.size('embed-dim')} with "
        f"{settings.size('attention-heads')} attention heads, and read blocks of "
        f"{settings.trained} tokens. They differ only in what tells them the "
        f"order of the tokens. Each was trained for {settings.updates:,} updates, "
        f"{int(settings.option('--max-tokens')):,} tokens at a time, once for each seed "
        f"({_list(settings.seeds)}) and learning rate ({_list(settings.lrs)}). With the "
        "same seed they read the same text in the same order"
        f"{', with the same masks' if settings.family == MASKED else ''}."
    )


def _list(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))


def table(models: Sequence[Judged]) -> str:
    """Return the table of all models, in Markdown."""
    header = (
        *("encoding", "position parameters", "learning rate", "seeds", "validation perplexity"),
        *("tokens/s", "time"),
    )
    return markdown.table(header, map(_row, models))


def _row(model: Judged) -> tuple[str, ...]:
    def mean(figure: Callable[[Outcome], float], show: Callable[[float], str]) -> str:
        return show(fmean(map(figure, model.ended))) if model.ended else "-"

    return (
        f"`{model.contender.name}`",
        mean(lambda each: each.position_parameters, "{:,.0f}".format),
        *(model.lr, str(len(model.outcomes)), model.shown(2)),
        mean(lambda each: each.curve.speed, "{:,.0f}".format),
        mean(lambda each: each.seconds, format_time),
    )


def record(results: Results) -> Record:
    """Return the figures of all models, and of all trainings."""
    settings = results.settings
    models = [
        {
            "model": model.contender.name,
            "position_encoding": model.contender.position_encoding,
            "attention_directions": model.contender.directions,
            "updates": settings.updates,
            "position_parameters": model.ended[0].position_parameters if model.ended else None,
            "lr": model.lr,
            "seeds": len(model.outcomes),
            **model.perplexity.figures("perplexity"),
        }
        for model in results.models
    ]
    trainings = [
        {
            "model": outcome.contender.name,
            "lr": outcome.lr,
            "seed": outcome.seed,
            "perplexity": outcome.perplexity,
            "tokens_per_second": outcome.curve.speed,
            "seconds": outcome.seconds,
            "diverged": outcome.diverged or None,
        }
        for outcome in results.outcomes
    ]
    text = str(settings.text) if settings.text else "the documentation inside Python"
    data = {"family": settings.family, "text": text, **results.text}
    data |= {"vocab_size": settings.vocab_size, "trained_length": settings.trained}
    figures = {"models": models, "trainings": trainings}
    return Record("compare", figures, data, command=own_command())
