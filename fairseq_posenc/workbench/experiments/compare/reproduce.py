"""Commands for the report: to run the comparison again or bigger, and those behind it."""

from __future__ import annotations

import shlex

from fairseq_posenc.workbench.experiments.text_settings import STACKS, TextSettings
from fairseq_posenc.workbench.experiments.variants import MASKED, join_list

_USER_DIR = ' --user-dir "$(fairseq-posenc user-dir)"'  # finds the package on every machine


def format_reruns(settings: TextSettings) -> str:
    """Show lines that run the comparison again, longer, with more seeds, or on other text."""
    out = str(settings.out)
    longer = ["--updates", str(4 * settings.updates)]
    seeds = range(max(settings.seeds) + 1, max(settings.seeds) + 4)
    more = ["--seeds", ",".join(map(str, (*settings.seeds, *seeds)))]
    rates = ["--lrs", "0.001,0.003,0.01"]
    bigger = ["--text", "big.txt", "--updates", "20000", "--vocab-size", "8000", "--lrs", "0.0005"]
    stack = STACKS[settings.family]
    larger = (
        f"--{stack}-layers 6 --{stack}-embed-dim 512 --{stack}-ffn-embed-dim 2048 "
        f"--{stack}-attention-heads 8 --dropout 0.1 --tokens-per-sample 256 --max-tokens 16384"
    )
    lines = [
        ("the same again: steps that are done are not repeated", []),
        ("four times as long: continues these trainings", longer),
        ("three more seeds: only these are trained", more),
        ("each model at the best of three learning rates", rates),
        (
            "bigger: for a text of millions of words, and a GPU, which is used if torch finds one",
            [*bigger, "--out", f"{out}-big", "--", larger],
        ),
        ("your own text", ["--text", "my.txt", "--out", f"{out}-my-text"]),
    ]
    shown = [f"# {comment}\n{_compare_command(settings, changes)}" for comment, changes in lines]
    return _fold("Run it again, longer, with more seeds, or on another text", "\n\n".join(shown))


def _compare_command(settings: TextSettings, changes: list[str]) -> str:
    """Build the command of this comparison with some options changed."""
    options = {
        "--family": settings.family if settings.family != MASKED else "",
        "--text": str(settings.text) if settings.text else "",
        "--encodings": join_list(settings.names),
        "--updates": str(settings.updates),
        "--seeds": ",".join(map(str, settings.seeds)),
        "--lrs": ",".join(settings.lrs),
        "--vocab-size": str(settings.vocab_size),
        "--out": str(settings.out),
        "--": shlex.join(settings.train_args),
    }
    options.update(zip(changes[::2], changes[1::2]))
    passed = options.pop("--")
    words = [word for key, value in options.items() if value for word in (key, value)]
    return f"fairseq-posenc compare {shlex.join(words)}" + (f" -- {passed}" if passed else "")


def format_commands(settings: TextSettings) -> str:
    """Show the commands that were called for each training."""
    lines = []
    for run in settings.runs:
        command = shlex.join(settings.train_command(run))
        lines += [f"# {settings.label(run)}", command + _USER_DIR]
    summary = "fairseq-train, as it was called, on one thread each"
    return _fold(summary, "\n".join(lines))


def _fold(summary: str, code: str) -> str:
    return f"<details>\n<summary>{summary}</summary>\n\n```sh\n{code}\n```\n\n</details>"
