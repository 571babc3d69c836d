"""The report: table, picture, what follows, and the lines to run it again or bigger."""

from __future__ import annotations

import platform
import shlex
from pathlib import Path

from fairseq_posenc.compare.pipeline import Outcome, Results, data_folder, model_folder
from fairseq_posenc.compare.settings import Settings
from fairseq_posenc.compare.statements import statements
from fairseq_posenc.compare.training import train_command, validate_command
from fairseq_posenc.reporting import markdown
from fairseq_posenc.reporting.learning import draw_lines, validation_line
from fairseq_posenc.reporting.pictures import can_draw
from fairseq_posenc.reporting.record import Record, own_command
from fairseq_posenc.running.progress import format_time, say
from fairseq_posenc.running.steps import write_whole

REPORT, PICTURE, RECORD = "report.md", "curves.png", "compare.json"
_USER_DIR = ' --user-dir "$(fairseq-posenc user-dir)"'  # finds the package on every machine
_BIGGER = (
    "--encoder-layers 6 --encoder-embed-dim 512 --encoder-ffn-embed-dim 2048 "
    "--encoder-attention-heads 8 --dropout 0.1 --tokens-per-sample 256 --max-tokens 16384 "
    "--lr 0.0005"
)


def write_report(results: Results) -> Path:
    """Write the report and, if matplotlib is installed, its picture; return the report's path."""
    out = results.settings.out
    drawn = False
    if can_draw():
        lines = {each.contender.name: validation_line(each.curve) for each in results.outcomes}
        title = "Validation perplexity of the masked language model"
        drawn = draw_lines(lines, title, out / PICTURE, log=True)
    else:
        say("no picture of the curves: matplotlib is not installed (pip install matplotlib)")
    parts = [
        "# Position encodings compared",
        _introduction(results),
        table(results.outcomes),
        _TABLE_NOTE,
        f"![Learning curves: validation perplexity over updates]({PICTURE})" if drawn else "",
        "## What follows from the figures",
        "\n".join(f"- {sentence}" for sentence in statements(results)),
        _CHANCE.format(seed=results.settings.seed),
        "## Run it again, or bigger",
        _again(results.settings),
        "## The commands behind it",
        _commands(results.settings),
    ]
    path = out / REPORT
    write_whole(path, "\n\n".join(part for part in parts if part) + "\n")
    return path


_TABLE_NOTE = (
    "Validation perplexity is `fairseq-validate`'s, of the masked tokens; lower is better. The "
    "masks are the same for every row. Tokens per second is the median during training; time is "
    "that of the training with its validations. Both are slower where the machine had other work "
    "meanwhile."
)
_CHANCE = (
    "These sentences are computed from the figures by fixed rules. Each model was trained once, "
    "with seed {seed}; another seed (below) tells how much of a difference is chance."
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
        f"{int(settings.option('--max-tokens')):,} tokens at a time, with the same text in the "
        "same order, the same masks and the same seed."
    )


def table(outcomes: list[Outcome]) -> str:
    """Return the table of all models, in Markdown."""
    header = ("encoding", "position parameters", "validation perplexity", "tokens/s", "time")
    rows = [
        (
            *(f"`{outcome.contender.name}`", f"{outcome.position_parameters:,}"),
            *(f"{outcome.perplexity:,.2f}", f"{outcome.curve.speed:,.0f}"),
            format_time(outcome.seconds),
        )
        for outcome in outcomes
    ]
    return markdown.table(header, rows)


def record(results: Results) -> Record:
    """Return the figures of all models."""
    settings = results.settings
    rows = [
        {
            "model": outcome.contender.name,
            "position_encoding": outcome.contender.position_encoding,
            "attention_directions": outcome.contender.directions,
            "updates": settings.updates,
            "position_parameters": outcome.position_parameters,
            "perplexity": outcome.perplexity,
            "tokens_per_second": outcome.curve.speed,
            "seconds": outcome.seconds,
        }
        for outcome in results.outcomes
    ]
    text = str(settings.text) if settings.text else "the documentation inside Python"
    data = {"text": text, **results.text, "vocab_size": settings.vocab_size}
    return Record("compare", {"models": rows}, data, seed=settings.seed, command=own_command())


def _again(settings: Settings) -> str:
    out = str(settings.out)
    longer = ["--updates", str(4 * settings.updates)]
    seed = ["--seed", str(settings.seed + 1)]
    bigger = ["--text", "big.txt", "--updates", "20000", "--vocab-size", "8000"]
    lines = [
        ("the same again: steps that are done are not repeated", []),
        ("four times as long: continues these trainings", longer),
        ("other random numbers", [*seed, "--out", f"{out}-seed-{settings.seed + 1}"]),
        (
            "bigger: for a text of millions of words, and a GPU, which is used if torch finds one",
            [*bigger, "--out", f"{out}-big", "--", _BIGGER],
        ),
        ("your own text", ["--text", "my.txt", "--out", f"{out}-my-text"]),
    ]
    shown = [f"# {comment}\n{_compare_command(settings, changes)}" for comment, changes in lines]
    return "```sh\n" + "\n\n".join(shown) + "\n```"


def _compare_command(settings: Settings, changes: list[str]) -> str:
    """Return the command of this comparison with some options changed."""
    options = {
        "--text": str(settings.text) if settings.text else "",
        "--encodings": ",".join(contender.name for contender in settings.contenders),
        "--updates": str(settings.updates),
        "--seed": str(settings.seed),
        "--vocab-size": str(settings.vocab_size),
        "--out": str(settings.out),
        "--": shlex.join(settings.train_args),
    }
    options.update(zip(changes[::2], changes[1::2]))
    for_fairseq = options.pop("--")
    words = [word for key, value in options.items() if value for word in (key, value)]
    line = f"fairseq-posenc compare {shlex.join(words)}"
    return f"{line} -- {for_fairseq}" if for_fairseq else line


def _commands(settings: Settings) -> str:
    data = data_folder(settings)
    lines = []
    for contender in settings.contenders:
        folder = model_folder(settings, contender)
        lines += [
            f"# {contender.name}",
            shlex.join(train_command(data, folder, contender, settings)) + _USER_DIR,
            shlex.join(validate_command(data, folder, settings)) + _USER_DIR,
        ]
    commands = "```sh\n" + "\n".join(lines) + "\n```"
    summary = "fairseq-train and fairseq-validate, as they were called"
    return f"<details>\n<summary>{summary}</summary>\n\n{commands}\n\n</details>"
