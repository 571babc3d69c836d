"""The report: table, picture, and what follows from the figures."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean

from fairseq_posenc.compare.again import again, commands
from fairseq_posenc.compare.judging import Judged
from fairseq_posenc.compare.pipeline import Results
from fairseq_posenc.compare.statements import statements
from fairseq_posenc.reporting import markdown
from fairseq_posenc.reporting.intervals import NOTE
from fairseq_posenc.reporting.learning import draw_lines
from fairseq_posenc.reporting.pictures import can_draw
from fairseq_posenc.reporting.record import Record, own_command
from fairseq_posenc.running.files import write_whole
from fairseq_posenc.running.progress import format_time, say

REPORT, PICTURE, RECORD = "report.md", "curves.png", "compare.json"


def write_report(results: Results) -> Path:
    """Write the report and, if matplotlib is installed, its picture; return the report's path."""
    out = results.settings.out
    drawn = False
    if can_draw():
        curves = {model.contender.name: model.curve for model in results.models}
        lines = {name: [(x, y.mean) for x, y in curve] for name, curve in curves.items()}
        bands = {name: [(x, y.low, y.high) for x, y in curve] for name, curve in curves.items()}
        title = "Validation perplexity of the masked language model"
        drawn = draw_lines(lines, title, out / PICTURE, log=True, bands=bands)
    else:
        say("no picture of the curves: matplotlib is not installed (pip install matplotlib)")
    parts = [
        "# Position encodings compared",
        _introduction(results),
        table(results.models),
        _TABLE_NOTE,
        f"![Learning curves: validation perplexity over updates]({PICTURE})" if drawn else "",
        "## What follows from the figures",
        "\n".join(f"- {sentence}" for sentence in statements(results.models)),
        _RULE,
        "## Run it again, or bigger",
        again(results.settings),
        "## The commands behind it",
        commands(results.settings),
    ]
    path = out / REPORT
    write_whole(path, "\n\n".join(part for part in parts if part) + "\n")
    return path


_TABLE_NOTE = (
    "Validation perplexity is `fairseq-validate`'s, of the masked tokens; lower is better. It is "
    f"that of the mean loss over the seeds, with its interval ({NOTE}); the picture's bands are "
    "that too. The masks of a seed are the same for every encoding. Where there are several "
    "learning rates, a model is judged at the one with the lowest mean loss on this same text. "
    "Tokens per second is the median during training; time is that of a training with its "
    "validations, each on one thread: means over the seeds. Both are slower where the machine had "
    "other work meanwhile."
)
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
        f"Masked language models on real text: {source}, {words['words']:,} words in "
        f"{words['documents']:,} documents, of which {words['valid_words']:,} words are kept for "
        f"validation, cut into {settings.vocab_size:,} sentencepieces. The models have "
        f"{settings.option('--encoder-layers')} layers of width "
        f"{settings.option('--encoder-embed-dim')} with "
        f"{settings.option('--encoder-attention-heads')} attention heads, and read blocks of "
        f"{settings.option('--tokens-per-sample')} tokens. They differ only in what tells them the "
        f"order of the tokens. Each was trained for {settings.updates:,} updates, "
        f"{int(settings.option('--max-tokens')):,} tokens at a time, once with each of the seeds "
        f"{_list(settings.seeds)}, at each of the learning rates {_list(settings.lrs)}. With the "
        "same seed they read the same text in the same order, with the same masks."
    )


def _list(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))


def table(models: Sequence[Judged]) -> str:
    """Return the table of all models, in Markdown."""
    header = (
        *("encoding", "position parameters", "learning rate", "seeds", "validation perplexity"),
        *("tokens/s", "time"),
    )
    rows = [
        (
            *(f"`{model.contender.name}`", f"{model.outcomes[0].position_parameters:,}"),
            *(model.lr, str(len(model.outcomes)), model.perplexity.show(2)),
            f"{fmean(outcome.curve.speed for outcome in model.outcomes):,.0f}",
            format_time(fmean(outcome.seconds for outcome in model.outcomes)),
        )
        for model in models
    ]
    return markdown.table(header, rows)


def record(results: Results) -> Record:
    """Return the figures of all models, and of all trainings."""
    settings = results.settings
    models = [
        {
            "model": model.contender.name,
            "position_encoding": model.contender.position_encoding,
            "attention_directions": model.contender.directions,
            "updates": settings.updates,
            "position_parameters": model.outcomes[0].position_parameters,
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
        }
        for outcome in results.outcomes
    ]
    text = str(settings.text) if settings.text else "the documentation inside Python"
    data = {"text": text, **results.text, "vocab_size": settings.vocab_size}
    figures = {"models": models, "trainings": trainings}
    return Record("compare", figures, data, command=own_command())
