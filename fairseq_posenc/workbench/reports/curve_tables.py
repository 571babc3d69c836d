"""Formats training logs as tables: best validations, epochs, seeds, and stages of the loss.

A training is a name with the curves of one or more seeds. Tables of single curves number the seeds,
as in ``rope 2``. fairseq logs losses in bits; those in nats are ``ln 2`` times as large.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from fairseq_posenc.workbench.results import differences, intervals
from fairseq_posenc.workbench.results.loss_stages import (
    MIN_FALL,
    SLOPE_RATIO,
    find_stages,
    fit_segments,
    last_loss,
    training_points,
)
from fairseq_posenc.workbench.results.markdown import code, format_number, table
from fairseq_posenc.workbench.results.record import Row
from fairseq_posenc.workbench.running.logs import Curve, Entry

Curves = Mapping[str, Curve]
Trainings = Mapping[str, Sequence[Curve]]  # name -> a curve for each seed
_STAGES_NOTE = (
    "The loss is fitted with line segments, as many as its noise warrants. The dive is the "
    f"steepest segment that follows one at least {SLOPE_RATIO} times flatter (the plateau), which "
    f"in turn follows one {SLOPE_RATIO} times steeper (the start). It lasts while the loss falls "
    f"at least 1/{SLOPE_RATIO} as fast, and must make up {MIN_FALL:.0%} of the whole fall of the "
    "loss."
)


def format_all_tables(trainings: Trainings) -> str:
    """Format all tables, and list trainings that diverged."""
    curves = _number_seeds(trainings)
    parts = [_format_best(curves), *_format_epochs(trainings), *_format_seeds(trainings)]
    parts += [*_format_stages(curves), _list_divergences(curves)]
    return "\n\n".join(filter(None, parts)) + "\n"


def _number_seeds(trainings: Trainings) -> dict[str, Curve]:
    """Collect all trainings by name, with a number in the names of those that differ by seed."""
    return {
        f"{name} {number}" if len(curves) > 1 else name: curve
        for name, curves in trainings.items()
        for number, curve in enumerate(curves, start=1)
    }


def collect_figures(trainings: Trainings) -> dict[str, list[Row]]:
    """Collect the figures of all tables for the record."""
    tables: dict[str, list[Row]] = {
        name: [] for name in ("best", "epochs", "stages", "pieces", "seeds")
    }
    for name, curve in _number_seeds(trainings).items():
        best = curve.best
        broken = [entry.updates for entry in curve.entries if not entry.is_finite]
        row = {
            "training": name,
            "updates": curve.entries[-1].updates,
            "best_at": best.updates if best.is_finite else None,
            "loss_bits": best.loss,
            "perplexity": best.perplexity if best.is_finite else None,
            "accuracy": best.accuracy,
            "tokens_per_second": curve.speed,
            "diverged_at": broken[0] if broken else None,
        }
        tables["best"].append(row)
        for epoch, entry in curve.epochs.items():
            point = {"epoch": epoch, "update": entry.updates, "perplexity": entry.perplexity}
            tables["epochs"].append({"training": name, **point})
        if stages := find_stages(curve):
            ends = {f"{stage}_ends": updates for stage, updates in stages._asdict().items()}
            tables["stages"].append({"training": name, **ends})
        for segment in fit_segments(training_points(curve)):
            fit = {"last_update": segment.end, "nats_in_1000_updates": 1000 * segment.rate}
            tables["pieces"].append({"training": name, **fit})
    for name, curves in trainings.items():
        if len(curves) > 1:
            figures: dict[str, float] = {}
            for figure, mean in _average_over_seeds(curves).items():
                figures |= mean.figures(figure)
            tables["seeds"].append({"training": name, "seeds": len(curves), **figures})
    return tables


def _average_over_seeds(curves: Sequence[Curve]) -> dict[str, intervals.Interval]:
    """Compute means of trainings that differ by seed; those of stages only if all have stages."""
    means = {
        "perplexity": intervals.interval_of_perplexity(curve.best.perplexity for curve in curves)
    }
    ends = [loss for loss in map(last_loss, curves) if loss is not None]
    if len(ends) == len(curves):
        means["loss_at_the_end_nats"] = intervals.interval(ends)
    stages = [stage for stage in map(find_stages, curves) if stage is not None]
    if len(stages) == len(curves):
        means["plateau_ends"] = intervals.interval(stage.plateau for stage in stages)
        means["plateau"] = intervals.interval(stage.plateau_length for stage in stages)
    return means


def _format_seeds(trainings: Trainings) -> list[str]:
    several = {name: curves for name, curves in trainings.items() if len(curves) > 1}
    columns = ["training", "seeds", "best perplexity", "loss at the end (nats)"]
    columns += ["with a dive after a plateau", "plateau ends", "length of the plateau"]
    rows = []
    for name, curves in several.items():
        means = _average_over_seeds(curves)
        dives = sum(find_stages(curve) is not None for curve in curves)
        rows.append(
            [
                code(name),
                str(len(curves)),
                _format_mean(means.get("perplexity"), 2),
                _format_mean(means.get("loss_at_the_end_nats"), 3),
                f"{dives} of {len(curves)}",
                _format_mean(means.get("plateau_ends"), 0),
                _format_mean(means.get("plateau"), 0),
            ]
        )
    if not rows:
        return []
    parts = [
        "## Means over seeds",
        table(columns, rows),
        f"In brackets: {intervals.INTERVAL_NOTE}.",
    ]
    return parts + _format_differences(several)


def _format_mean(mean: intervals.Interval | None, digits: int) -> str:
    return mean.show(digits) if mean and math.isfinite(mean.mean) else "-"


def _format_differences(trainings: Trainings) -> list[str]:
    """Compare the best perplexities, assuming that the n-th trainings of all names share a seed."""
    best = {
        name: {seed: curve.best.perplexity for seed, curve in enumerate(curves)}
        for name, curves in trainings.items()
        if all(curve.best.is_finite for curve in curves)
    }
    if len(best) < 2:
        return []
    explanation = differences.explain_few_seeds(min(map(len, best.values())))
    sentences = [explanation] if explanation else differences.describe_differences(best)
    return [
        "\n".join(f"- {sentence}" for sentence in sentences),
        f"The n-th logs of two names count as one seed. {differences.TEST_NOTE}",
    ]


def _format_best(curves: Curves) -> str:
    """Format the best validation of each training."""
    accuracies = any(curve.best.accuracy is not None for curve in curves.values())
    columns = ["training", "updates", "best at", "loss (bits)", "loss (nats)", "perplexity"]
    if accuracies:
        columns.append("accuracy")
    rows = []
    for name, curve in curves.items():
        best = curve.best
        row = [code(name), format_number(curve.entries[-1].updates)]
        row.append(format_number(best.updates) if best.is_finite else "-")
        row += [format_number(best.loss, 3), format_number(best.nats, 3), _format_perplexity(best)]
        if accuracies:
            row.append("-" if best.accuracy is None else f"{best.accuracy:.1f} %")
        rows.append([*row, format_number(curve.speed or None)])  # 0 if the log does not say
    return table([*columns, "tokens/s"], rows)


def _format_epochs(trainings: Trainings) -> list[str]:
    perplexities = {name: _average_epochs(curves) for name, curves in trainings.items()}
    epochs = sorted(set().union(*perplexities.values()))
    if not epochs:
        return []
    rows = [
        [str(epoch), *(_format_perplexity(entries.get(epoch)) for entries in perplexities.values())]
        for epoch in epochs
    ]
    header = ["epoch", *map(code, perplexities)]
    return ["## Perplexity by epoch", table(header, rows), *_format_reached(perplexities)]


def _average_epochs(curves: Sequence[Curve]) -> dict[int, Entry]:
    """Average the perplexities of the last validation of each epoch that all seeds have."""
    averages = {}
    for epoch, entry in curves[0].epochs.items():
        if all(epoch in curve.epochs for curve in curves):
            perplexities = (curve.epochs[epoch].perplexity for curve in curves)
            averages[epoch] = entry._replace(
                perplexity=intervals.interval_of_perplexity(perplexities).mean
            )
    return averages


def _format_perplexity(entry: Entry | None) -> str:
    return format_number(entry.perplexity, 2) if entry and entry.is_finite else "-"


def _format_reached(perplexities: Mapping[str, Mapping[int, Entry]]) -> list[str]:
    """Format when each training reaches the lowest perplexity that all of them reach."""
    lowest = {
        name: min(entry.perplexity for entry in entries.values())
        for name, entries in perplexities.items()
        if entries
    }
    if len(lowest) < 2:
        return []
    target = max(lowest.values())
    parts = []
    for name in lowest:
        first = next(x for x in perplexities[name].values() if x.perplexity <= target)
        parts.append(f"{code(name)} at epoch {first.epoch} (update {first.updates:,})")
    return [f"The lowest perplexity that all reach, {target:,.2f}: {', '.join(parts)}."]


def _format_stages(curves: Curves) -> list[str]:
    if not any(curve.training for curve in curves.values()):
        return []
    columns = ["training", "lines every", "start ends", "plateau ends", "dive ends"]
    columns += ["length of the plateau", "loss at the end (nats)"]
    rows = []
    for name, curve in curves.items():
        updates = [entry.updates for entry in curve.training]
        every = min((after - before for before, after in zip(updates, updates[1:])), default="-")
        cells = ["-", "no dive after a plateau", "-", "-"]
        if stages := find_stages(curve):
            cells = [f"{update:,}" for update in (*stages, stages.plateau_length)]
        rows.append([code(name), str(every), *cells, format_number(last_loss(curve), 3)])
    return ["## Stages of the training loss, in updates", table(columns, rows), _STAGES_NOTE]


def _list_divergences(curves: Curves) -> str:
    """List the trainings with losses that are NaN or infinite; tables and pictures omit these."""
    lines = []
    for name, curve in curves.items():
        for kind, entries in (("training", curve.training), ("validation", curve.entries)):
            if broken := [entry for entry in entries if not entry.is_finite]:
                lines.append(
                    f"- {code(name)} diverged: the {kind} loss is {broken[0].loss:g} at update "
                    f"{broken[0].updates:,} first, and NaN or infinite in {len(broken)} of "
                    f"{len(entries)} lines, which are left out"
                )
    return "\n".join(lines)
