"""The report of a probe: tables, what they allow one to say, and the record."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from fairseq_posenc.workbench.experiments.probe.data import READ
from fairseq_posenc.workbench.experiments.probe.results import Results
from fairseq_posenc.workbench.results import markdown
from fairseq_posenc.workbench.results.differences import RULE, Scale, compare, few_seeds
from fairseq_posenc.workbench.results.intervals import NOTE, Interval
from fairseq_posenc.workbench.results.record import Record, own_command
from fairseq_posenc.workbench.running.files import write_whole
from fairseq_posenc.workbench.running.progress import format_time

_SHARE = Scale("share of right answers", higher=True)
REPORT, RECORD, PICTURE = "probe.md", "probe.json", "probe.png"


def write_report(results: Results, drawn: bool) -> Path:
    """Write tables, and the picture if there is one, as a page; return its path."""
    settings = results.settings
    parts = ["# Tasks with known answers", _introduction(results), tables(results)]
    if drawn:
        parts.append(f"![Share of right answers over the questions' length]({PICTURE})")
    path = settings.out / REPORT
    write_whole(path, "\n\n".join([*parts, f"```sh\n{own_command()}\n```"]) + "\n")
    return path


def _introduction(results: Results) -> str:
    settings = results.settings
    known = [outcome.seconds for outcome in results.outcomes if outcome.seconds is not None]
    seconds = format_time(fmean(known)) if known else "-"
    return (
        f"Models ({settings.family}), each trained on one task for {settings.updates:,} updates "
        f"with questions of up to {settings.trained} words, once for each seed "
        f"({', '.join(map(str, settings.seeds))}) on one thread ({seconds} on average), and read "
        f"at the lengths {', '.join(map(str, settings.lengths))}, {READ} questions each. A share "
        "is of the questions whose whole answer is right, as greedy search would find it; it comes "
        f"with its interval ({NOTE}). {RULE}"
    )


def tables(results: Results) -> str:
    """Return all tables and sentences."""
    parts = []
    if results.within:
        parts += ["Lengths as in training:", _shares(results, results.within)]
    if results.beyond:
        parts += [
            "Longer than in training, and the mean over tasks of 1 / rank there (Kazemnejad et al. "
            "2023):",
            _shares(results, results.beyond, ranks=True),
            "\n".join(f"- {_best(results, task.name)}" for task in results.settings.tasks),
            few_seeds(len(results.settings.seeds)) or "",
        ]
    return "\n\n".join(filter(None, parts))


def _shares(results: Results, lengths: Sequence[int], ranks: bool = False) -> str:
    tasks = [task.name for task in results.settings.tasks]
    header = ["encoding", *(["mean reciprocal rank"] if ranks else []), *tasks]
    rows = []
    for model in results.models:
        found = [results.reciprocal_rank(model)] if ranks else []
        found += [results.exact(task, model, lengths) for task in tasks]
        rows.append([f"`{model}`", *(each.show(2) for each in found)])
    return markdown.table(header, rows)


def _best(results: Results, task: str) -> str:
    """Say which models differ significantly from the best of a task, and which do not."""
    shares = {model: results.exact(task, model, results.beyond) for model in results.models}
    best = max(shares, key=lambda model: shares[model].mean)
    seeds = {model: results.by_seed(task, model, results.beyond) for model in results.models}
    found = {name: compare(seeds[best], seeds[name], _SHARE) for name in shares if name != best}
    below = [name for name, each in found.items() if each.is_significant]
    same = [name for name, each in found.items() if each.is_judged and not each.is_significant]
    parts = [f"significantly above {_names(below)}"] if below else []
    parts += [f"not significantly different from {_names(same)}"] if same else []
    return f"{task}: `{best}` is {_and(shares[best], parts)}."


def _and(share: Interval, parts: Sequence[str]) -> str:
    return ", ".join([f"right in {share.mean:.0%}", *parts])


def _names(models: Sequence[str]) -> str:
    return ", ".join(f"`{model}`" for model in models)


def record(results: Results) -> Record:
    """Return the figures: of each model, by task and length, and of all trainings."""
    settings = results.settings
    models = [
        {
            "model": contender.name,
            "position_encoding": contender.position_encoding,
            "attention_directions": contender.directions,
            "task": task.name,
            "length": length,
            "seeds": len(settings.seeds),
            **results.exact(task.name, contender.name, [length]).figures("exact"),
        }
        for task in settings.tasks
        for contender in settings.contenders
        for length in settings.lengths
    ]
    ranks = [
        {"model": model, **results.reciprocal_rank(model).figures("mean_reciprocal_rank")}
        for model in (results.models if results.beyond else [])
    ]
    trainings = [
        {
            **{"model": each.contender.name, "task": each.task, "seed": each.seed},
            **{f"length_{length}": share for length, share in each.exact.items()},
            "seconds": each.seconds,
        }
        for each in results.outcomes
    ]
    data = {"family": settings.family, "updates": settings.updates, "trained": settings.trained}
    figures = {"lengths": models, "ranks": ranks, "trainings": trainings}
    return Record("probe", figures, data, command=own_command())
