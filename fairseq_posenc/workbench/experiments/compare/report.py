"""Writes the report of a comparison: a table, a picture, conclusions, and commands.

The report of an unfinished comparison has the figures so far; its page reloads itself.
"""

from __future__ import annotations

import math
import platform
import shlex
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Optional

from fairseq_posenc.analysis.listing import list_encodings
from fairseq_posenc.files import write_whole
from fairseq_posenc.specs import parse
from fairseq_posenc.workbench.experiments.compare.statements import derive_statements
from fairseq_posenc.workbench.experiments.outcomes import Outcome, SeedAggregate
from fairseq_posenc.workbench.experiments.text_experiment import STACKS, TextExperiment, TextResults
from fairseq_posenc.workbench.experiments.variants import CAUSAL, MASKED, Run, join_list
from fairseq_posenc.workbench.results import differences, intervals, markdown, terminal
from fairseq_posenc.workbench.results.html_page import convert_to_html
from fairseq_posenc.workbench.results.learning_curves import draw_curves
from fairseq_posenc.workbench.results.pictures import Line, can_draw
from fairseq_posenc.workbench.running.logs import Curve
from fairseq_posenc.workbench.running.progress import format_time, say

REPORT = "report.md"
PICTURE = "curves.png"
PAGE = "report.html"
FILES = (REPORT, PICTURE, PAGE)
# Columns of the table on a terminal; the report has them all.
_SCREEN_COLUMNS = ["encoding", "validation perplexity", "each seed", "position parameters", "time"]
_FAMILIES = {MASKED: "masked language model", CAUSAL: "causal language model"}


def write_report(results: TextResults, seconds_left: Optional[float] = None) -> Path:
    """Write the report as Markdown and as a page, with its picture; return the Markdown's path."""
    out = results.experiment.out
    drawn = False
    if can_draw():
        title = f"Validation perplexity of the {_FAMILIES[results.experiment.family]}"
        drawn = draw(results, title, out / PICTURE)
    elif not results.missing:
        say("no picture of the curves: matplotlib is not installed (pip install matplotlib)")
    parts = [
        "# Position encodings compared",
        _describe_missing(results, seconds_left),
        _introduce(results),
        format_table(results),
        "\n".join(_describe_encodings(results.experiment)),
        "**An encoding that learns late is not worse.** The table shows which small models learn "
        f"within {results.experiment.updates:,} updates. Others may start later, and the order may "
        "change.",
        f"![Learning curves: validation perplexity over updates]({PICTURE})" if drawn else "",
        "## Conclusions",
        "\n".join(f"- {sentence}" for sentence in list_conclusions(results)),
        f"{differences.TEST_NOTE} All sentences are derived from the figures by fixed rules.",
        _explain_figures(results.experiment),
        *_suggest_next_steps(results),
        "## Commands",
        _format_rerun(results.experiment),
        _format_trainings(results.experiment),
    ]
    path = out / REPORT
    report = "\n\n".join(filter(None, parts)) + "\n"
    write_whole(path, report)
    page = convert_to_html(report, out)
    write_whole(out / PAGE, page)
    return path


def list_conclusions(results: TextResults) -> list[str]:
    """Derive conclusions from the figures, or say that the comparison is not finished."""
    if results.missing:
        return ["Differences are judged when all trainings are finished."]
    unigram = results.data_figures["unigram_perplexity"]
    masked = results.experiment.family == MASKED
    return derive_statements(results.models, unigram, masked=masked)


def _describe_missing(results: TextResults, seconds_left: Optional[float]) -> str:
    """List the missing trainings of an unfinished comparison."""
    if not results.missing:
        return ""
    parts = []
    for seed, runs in groupby(results.missing, key=lambda run: run.seed):  # they go seed by seed
        names = dict.fromkeys(markdown.code(run.variant.name) for run in runs)
        parts.append(f"seed {seed} of {', '.join(names)}")
    about = f", about {format_time(seconds_left)} more" if seconds_left else ""
    return f"**The run is not finished{about}.** Missing: {'; '.join(parts)}."


def _describe_encodings(experiment: TextExperiment) -> list[str]:
    """Describe each encoding of the comparison in a line."""
    names = {
        item.name
        for variant in experiment.variants
        for item in parse(variant.position_encoding).items
    }
    lines = [
        f"- {markdown.code(entry.name)}: {entry.summary.replace('``', '`')}"
        for entry in list_encodings()
        if entry.name in names
    ]
    lines += [
        f"- {markdown.code(variant.name)}: DecBERT; its first layers attend {variant.directions} "
        "(lr: to the token and those before it, rl: to the token and those after it), with the "
        f"positions {markdown.code(variant.position_encoding)}"
        for variant in experiment.variants
        if variant.directions
    ]
    return lines


def _suggest_next_steps(results: TextResults) -> list[str]:
    """Suggest commands that look closer at a finished comparison."""
    models = [model for model in results.models if not model.divergences and model.curve]
    if results.missing or not models:
        return []
    best = min(models, key=lambda model: model.sort_key)
    checkpoint = results.experiment.folder(best.outcomes[0].run) / "checkpoint_best.pt"
    name = parse(best.variant.position_encoding).items[0].name
    commands = [
        "# a page with every head of the model with the lowest perplexity",
        f"fairseq-posenc inspect --checkpoint {shlex.quote(str(checkpoint))} --text "
        '"a sentence of the text"',
        "# measurements of all encodings",
        f"fairseq-posenc choose --family {results.experiment.family} --length "
        f"{results.experiment.trained}",
        "# formula and cost",
        f"fairseq-posenc describe {name}",
    ]
    code = "\n".join(commands)
    advice = "Train for longer, with more seeds or on your own text, by the commands below. "
    return ["## What to do next", f"{advice}Or look closer:", f"```sh\n{code}\n```"]


def _explain_figures(experiment: TextExperiment) -> str:
    """Explain the columns of the table."""
    is_masked = experiment.family == MASKED
    return (
        "Validation perplexity is measured at the end of `fairseq-train`, on "
        f"{'the masked' if is_masked else 'all'} tokens; lower is better. It is computed from the "
        f"mean loss over the seeds, with an interval for {intervals.LEAST_SEEDS} seeds or more "
        f"({intervals.INTERVAL_NOTE}); the picture shows intervals as bands, and seeds as dots. "
        f"{'With the same seed, all models see the same masks. ' if is_masked else ''}With several "
        "learning rates, a model is judged at the one with the lowest mean loss on the same "
        "validation text. Tokens per second is the median during training; time is that of a "
        "training with its validations, on one thread. Both are means over the seeds, and are "
        "worse if trainings share a core or the machine has other work. On one machine, the same "
        "command gives the same figures; another processor rounds sums differently, which changes "
        "them as much as another seed does."
    )


def _introduce(results: TextResults) -> str:
    """Describe the text, the models and their trainings."""
    experiment, counts = results.experiment, results.data_figures
    source = (
        markdown.code(str(experiment.text))
        if experiment.text
        else f"Python's own documentation, version {platform.python_version()}"
    )
    return (
        f"{_FAMILIES[experiment.family].capitalize()}s on real text: {source}, "
        f"{counts['words']:,} words in {counts['documents']:,} documents, of which "
        f"{counts['valid_words']:,} words are kept for validation, split into "
        f"{experiment.vocab_size:,} sentencepieces. The models have "
        f"{experiment.size('layers')} layers of width {experiment.size('embed-dim')} with "
        f"{experiment.size('attention-heads')} attention heads, and read blocks of "
        f"{experiment.trained} tokens. They differ only in their position encoding. Each is "
        f"trained for {experiment.updates:,} updates of "
        f"{experiment.count('--max-tokens'):,} tokens, once for each seed "
        f"({', '.join(map(str, experiment.seeds))}) and learning rate "
        f"({', '.join(experiment.lrs)}). With the same seed they read the same text in the same "
        f"order{', with the same masks' if experiment.family == MASKED else ''}."
    )


def format_table(results: TextResults) -> str:
    """Format all models as a table in Markdown, with the figures so far of unfinished ones."""
    rows = {model.variant.name: _format_row(model, results.experiment) for model in results.models}
    rows |= {name: _format_begun(*begun) for name, begun in find_begun(results).items()}
    ordered = [rows[name] for name in results.experiment.names if name in rows]
    columns = list(ordered[0]) if ordered else _SCREEN_COLUMNS
    return markdown.table(columns, [list(row.values()) for row in ordered])


def format_screen(results: TextResults) -> str:
    """Format the figures and conclusions for a terminal, the lowest perplexity first."""
    models = sorted(results.models, key=lambda model: model.sort_key)
    rows = [_format_row(model, results.experiment) for model in models]
    cells = [[row[column] for column in _SCREEN_COLUMNS] for row in rows]
    sentences = [f"- {sentence}" for sentence in list_conclusions(results)]
    return terminal.format_report(
        "\n".join([markdown.table(_SCREEN_COLUMNS, cells), "", *sentences])
    )


def _format_row(model: SeedAggregate, experiment: TextExperiment) -> dict[str, str]:
    """Format the figures of a model by column, in the order of the report's columns."""

    def mean(figure: Callable[[Outcome], float], show: Callable[[float], str]) -> str:
        return show(fmean(map(figure, model.undiverged))) if model.undiverged else "-"

    seeds, total = len(model.outcomes), len(experiment.seeds)
    return {
        "encoding": markdown.code(model.variant.name),
        "position parameters": mean(
            lambda outcome: outcome.figures["position_parameters"], "{:,.0f}".format
        ),
        "learning rate": model.lr,
        "seeds": str(seeds) if seeds == total else f"{seeds} of {total}",
        "validation perplexity": model.show(2),
        "each seed": ", ".join(f"{outcome.perplexity:,.1f}" for outcome in model.undiverged) or "-",
        "tokens/s": mean(lambda outcome: outcome.curve.speed, "{:,.0f}".format),
        "time": mean(lambda outcome: outcome.seconds, format_time),
    }


def _format_begun(run: Run, curve: Curve) -> dict[str, str]:
    """Format the figures so far of a model without a finished training, as :func:`_format_row`."""
    updates, perplexity = curve.points[-1]
    return {
        "encoding": markdown.code(run.variant.name),
        "position parameters": "-",
        "learning rate": run.condition,
        "seeds": "0",
        "validation perplexity": f"{perplexity:,.2f} at update {updates:,}",
        "each seed": "-",
        "tokens/s": f"{curve.speed:,.0f}",
        "time": "-",
    }


def draw(results: TextResults, title: str, path: Path) -> bool:
    """Draw means, intervals and seeds into a PNG file; return False if there was no point."""
    lines = {model.variant.name: _build_line(model) for model in results.models}
    for name, (_, curve) in find_begun(results).items():
        lines[name] = Line.over_seeds([curve.points])
    return draw_curves(lines, title, path, log=True)


def _build_line(model: SeedAggregate) -> Line:
    """Build the curve of a model; a gap at its end is drawn as a cross."""
    seeds = [outcome.curve.points for outcome in model.outcomes]
    line = Line.over_seeds(seeds, intervals.interval_of_perplexity)
    if not model.divergences:
        return line
    gap = min(model.divergences.values()), intervals.interval([math.nan])
    return line._replace(mean=[*line.mean, gap])


def find_begun(results: TextResults) -> dict[str, tuple[Run, Curve]]:
    """Find the first curve, with its run, of each model that has no finished training."""
    finished = {outcome.run.variant for outcome in results.outcomes}
    begun: dict[str, tuple[Run, Curve]] = {}
    for run, curve in results.begun.items():
        if run.variant not in finished and curve.points:
            begun.setdefault(run.variant.name, (run, curve))
    return begun


def _format_rerun(experiment: TextExperiment) -> str:
    """Format the command of this comparison, and options that change it."""
    options = {  # those with an empty value are left out
        "--family": experiment.family if experiment.family != MASKED else "",
        "--text": str(experiment.text) if experiment.text else "",
        "--encodings": join_list(experiment.names),
        "--updates": str(experiment.updates),
        "--seeds": ",".join(map(str, experiment.seeds)),
        "--lrs": ",".join(experiment.lrs),
        "--vocab-size": str(experiment.vocab_size),
        "--out": str(experiment.out),
    }
    words = [word for option, value in options.items() if value for word in (option, value)]
    passed = ["--", *experiment.train_args] if experiment.train_args else []
    more_seeds = range(max(experiment.seeds) + 1, max(experiment.seeds) + 4)
    return (
        "This comparison again, which repeats no finished step:\n\n"
        f"```sh\nfairseq-posenc compare {shlex.join([*words, *passed])}\n```\n\n"
        f"Add `--updates {4 * experiment.updates}` to continue the trainings, `--seeds "
        f"{','.join(map(str, (*experiment.seeds, *more_seeds)))}` for three more seeds, or `--lrs "
        "0.001,0.003,0.01` for each model at the best of three learning rates. With another "
        "`--out`, add `--text FILE` for your own text, or `-- "
        f"--{STACKS[experiment.family]}-layers 6` and other options of `fairseq-train` for larger "
        "models."
    )


def _format_trainings(experiment: TextExperiment) -> str:
    """Format the commands of all trainings."""
    user_dir = ' --user-dir "$(fairseq-posenc user-dir)"'  # finds the package on every machine
    lines = []
    for run in experiment.runs:
        command = shlex.join(experiment.train_command(run)) + user_dir
        lines += [f"# {experiment.label(run)}", command]
    code = "\n".join(lines)
    summary = "fairseq-train, as it was called, on one thread each"
    return f"<details>\n<summary>{summary}</summary>\n\n```sh\n{code}\n```\n\n</details>"
