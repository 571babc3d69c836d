"""Tables in Markdown of trainings' logs: best validations, epochs, seeds, stages of the loss."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from fairseq_posenc.workbench.results.differences import (
    RULE,
    describe_differences,
    explain_few_seeds,
)
from fairseq_posenc.workbench.results.intervals import (
    NOTE,
    Interval,
    interval,
    interval_of_perplexity,
)
from fairseq_posenc.workbench.results.loss_stages import (
    LEAST,
    SLOW,
    find_stages,
    fit_segments,
    smooth_losses,
    training_points,
)
from fairseq_posenc.workbench.results.markdown import code, table
from fairseq_posenc.workbench.results.record import Row
from fairseq_posenc.workbench.running.logs import Curve, Entry

Curves = Mapping[str, Curve]
Trainings = Mapping[str, Sequence[Curve]]  # name -> a curve for each seed

STAGES_NOTE = (
    "The loss is fitted with straight segments, as many as its noise warrants. The dive is the "
    f"steepest segment that follows one at least {SLOW} times flatter (the plateau), which in turn "
    f"follows one {SLOW} times steeper (the start); it lasts while the loss falls at least "
    f"1/{SLOW} as fast, and must be {LEAST:.0%} of the loss's whole fall."
)


def format_all_tables(trainings: Trainings) -> str:
    """Format all tables, and name the losses that are NaN or infinite."""
    curves = _number_seeds(trainings)
    parts = [_format_best(curves), *_format_epochs(trainings), *_format_seeds(trainings)]
    parts += [*_format_stages(curves), _list_divergences(curves)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _number_seeds(trainings: Trainings) -> dict[str, Curve]:
    """Collect the single trainings, with a number in their names where a name has several."""
    return {
        f"{name} {number}" if len(curves) > 1 else name: curve
        for name, curves in trainings.items()
        for number, curve in enumerate(curves, start=1)
    }


def collect_figures(trainings: Trainings) -> dict[str, list[Row]]:
    """Collect the figures of all tables for the record."""
    curves = _number_seeds(trainings)
    return {
        "best": [_build_best_row(name, curve) for name, curve in curves.items()],
        "epochs": [
            {"training": name, "epoch": n, "update": each.updates, "perplexity": each.perplexity}
            for name, curve in curves.items()
            for n, each in curve.epochs.items()
        ],
        "stages": [
            {"training": name, **{f"{stage}_ends": at for stage, at in stages._asdict().items()}}
            for name, curve in curves.items()
            if (stages := find_stages(curve)) is not None
        ],
        "pieces": [
            {"training": name, "last_update": piece.end, "nats_in_1000_updates": 1000 * piece.rate}
            for name, curve in curves.items()
            for piece in fit_segments(training_points(curve))
        ],
        "seeds": [
            {"training": name, "seeds": len(each), **_flatten_means(_average_over_seeds(each))}
            for name, each in trainings.items()
            if len(each) > 1
        ],
    }


def _average_over_seeds(curves: Sequence[Curve]) -> dict[str, Interval]:
    """Compute means of trainings that differ by seed; of the stages where all have them."""
    means = {"perplexity": interval_of_perplexity(curve.best.perplexity for curve in curves)}
    ends = [points[-1][1] for points in map(smooth_losses, curves) if points]
    if len(ends) == len(curves):
        means["loss_at_the_end_nats"] = interval(ends)
    stages = [stage for stage in map(find_stages, curves) if stage is not None]
    if len(stages) == len(curves):
        means["plateau_ends"] = interval(each.plateau for each in stages)
        means["plateau"] = interval(each.plateau - each.start for each in stages)
    return means


def _flatten_means(means: Mapping[str, Interval]) -> Row:
    return {key: value for name, mean in means.items() for key, value in mean.figures(name).items()}


def _format_seeds(trainings: Trainings) -> list[str]:
    columns = ["training", "seeds", "best perplexity", "loss at the end (nats)"]
    columns += ["with a dive after a plateau", "plateau ends", "length of the plateau"]
    rows = []
    for name, curves in trainings.items():
        if len(curves) > 1:
            means = _average_over_seeds(curves)
            dives = sum(find_stages(curve) is not None for curve in curves)
            row = [code(name), str(len(curves)), _format_mean(means["perplexity"], 2)]
            row += [_format_mean(means.get("loss_at_the_end_nats"), 3), f"{dives} of {len(curves)}"]
            rows.append(
                [*row, *(_format_mean(means.get(key), 0) for key in ("plateau_ends", "plateau"))]
            )
    if not rows:
        return []
    parts = ["## Means over seeds", table(columns, rows), f"In brackets: {NOTE}."]
    return parts + _format_differences(
        {name: each for name, each in trainings.items() if len(each) > 1}
    )


def _format_differences(trainings: Trainings) -> list[str]:
    """Compare the best perplexities; the n-th trainings of all names are taken to share a seed."""
    best = {
        name: {seed: curve.best.perplexity for seed, curve in enumerate(curves)}
        for name, curves in trainings.items()
        if all(curve.best.is_finite for curve in curves)
    }
    if len(best) < 2:
        return []
    few = explain_few_seeds(min(map(len, best.values())))
    sentences = [few] if few else describe_differences(best)
    return [
        "\n".join(f"- {sentence}" for sentence in sentences),
        f"The n-th logs of two names count as one seed. {RULE}",
    ]


def _format_mean(value: Interval | None, digits: int) -> str:
    return "-" if value is None or not math.isfinite(value.mean) else value.show(digits)


def _build_best_row(name: str, curve: Curve) -> Row:
    best, broken = curve.best, [entry.updates for entry in curve.entries if not entry.is_finite]
    return {
        "training": name,
        "updates": curve.entries[-1].updates,
        "best_at": best.updates if best.is_finite else None,
        "loss_bits": best.loss,
        "perplexity": best.perplexity if best.is_finite else None,
        "accuracy": best.accuracy,
        "tokens_per_second": curve.speed,
        "diverged_at": broken[0] if broken else None,
    }


def _format_best(curves: Curves) -> str:
    """Format the best validation of each training."""
    accuracies = any(curve.best.accuracy is not None for curve in curves.values())
    columns = ["training", "updates", "best at", "loss (bits)", "loss (nats)"]
    columns += ["perplexity", *(["accuracy"] if accuracies else []), "tokens/s"]
    rows = []
    for name, curve in curves.items():
        best = curve.best
        row = [code(name), f"{curve.entries[-1].updates:,}"]
        row += [f"{best.updates:,}" if best.is_finite else "-"]
        row += [
            _format_number(best.loss, 3),
            _format_number(best.nats, 3),
            _format_perplexity(best),
        ]
        if accuracies:
            row.append("-" if best.accuracy is None else f"{best.accuracy:.1f} %")
        rows.append([*row, f"{curve.speed:,.0f}" if curve.speed else "-"])
    return table(columns, rows)


def _format_epochs(trainings: Trainings) -> list[str]:
    perplexities = {name: _average_epochs(curves) for name, curves in trainings.items()}
    epochs = sorted({epoch for each in perplexities.values() for epoch in each})
    if not epochs:
        return []
    rows = [
        [str(epoch), *(_format_perplexity(each.get(epoch)) for each in perplexities.values())]
        for epoch in epochs
    ]
    header = ["epoch", *(code(name) for name in perplexities)]
    return ["## Perplexity by epoch", table(header, rows), *_format_reached(perplexities)]


def _average_epochs(curves: Sequence[Curve]) -> dict[int, Entry]:
    """Take the last validation of each epoch that all seeds have, with their mean perplexity."""
    by_seed = [curve.epochs for curve in curves]
    return {
        epoch: entry._replace(
            perplexity=interval_of_perplexity(each[epoch].perplexity for each in by_seed).mean
        )
        for epoch, entry in by_seed[0].items()
        if all(epoch in each for each in by_seed)
    }


def _format_perplexity(entry: Entry | None) -> str:
    return "-" if entry is None or not entry.is_finite else f"{entry.perplexity:,.2f}"


def _format_number(value: float, digits: int) -> str:
    return f"{value:.{digits}f}" if math.isfinite(value) else "-"


def _format_reached(perplexities: Mapping[str, Mapping[int, Entry]]) -> list[str]:
    """Format when each reaches the lowest perplexity, at the end of an epoch, that all reach."""
    lowest = {
        name: min(entry.perplexity for entry in each.values())
        for name, each in perplexities.items()
        if each
    }
    if len(lowest) < 2:
        return []
    worst = max(lowest, key=lowest.__getitem__)
    parts = []
    for name in lowest:
        epochs = perplexities[name].items()
        epoch, entry = next(pair for pair in epochs if pair[1].perplexity <= lowest[worst])
        parts.append(f"{code(name)} at epoch {epoch} (update {entry.updates:,})")
    return [
        f"{code(worst)} comes down to {lowest[worst]:,.2f}. That is reached by {', '.join(parts)}."
    ]


def _format_stages(curves: Curves) -> list[str]:
    if not any(curve.training for curve in curves.values()):
        return []
    columns = ["training", "lines every", "start ends", "plateau ends", "dive ends"]
    columns += ["length of the plateau", "loss at the end (nats)"]
    rows = []
    for name, curve in curves.items():
        points = smooth_losses(curve)
        stages = find_stages(curve)
        ends = ["-", "no dive after a plateau", "-", "-"]
        if stages is not None:
            ends = [f"{update:,}" for update in (*stages, stages.plateau - stages.start)]
        last = f"{points[-1][1]:.3f}" if points else "-"
        rows.append([code(name), _find_log_interval(curve), *ends, last])
    return ["## Stages of the training loss, in updates", table(columns, rows), STAGES_NOTE]


def _find_log_interval(curve: Curve) -> str:
    updates = [entry.updates for entry in curve.training]
    return str(min(b - a for a, b in zip(updates, updates[1:]))) if len(updates) > 1 else "-"


def _list_divergences(curves: Curves) -> str:
    """List the losses that are NaN or infinite, which are neither drawn nor counted."""
    lines = []
    for name, curve in curves.items():
        for what, entries in (("training", curve.training), ("validation", curve.entries)):
            broken = [entry for entry in entries if not entry.is_finite]
            if broken:
                lines.append(
                    f"- {code(name)} diverged: the {what} loss is {broken[0].loss:g} at update "
                    f"{broken[0].updates:,} first, and NaN or infinite in {len(broken)} of "
                    f"{len(entries)} lines; these are left out"
                )
    return "\n".join(lines)
