"""The picture of a comparison: the learning curve of each model, over its seeds."""

from __future__ import annotations

import math
from pathlib import Path

from fairseq_posenc.workbench.experiments.results import SeedAggregate
from fairseq_posenc.workbench.experiments.settings import Run
from fairseq_posenc.workbench.experiments.text_experiment import TextResults
from fairseq_posenc.workbench.results.learning_curves import draw_lines
from fairseq_posenc.workbench.running.logs import Curve


def draw(results: TextResults, title: str, path: Path) -> bool:
    """Draw means, intervals and seeds into a PNG file; say whether there is anything to draw."""
    curves = {model.variant.name: model.curve for model in results.models}
    lines = {model.variant.name: line_of(model) for model in results.models}
    lines |= {name: curve.points for name, (_, curve) in begun(results).items()}
    bands = {name: [(x, y.low, y.high) for x, y in curve] for name, curve in curves.items()}
    dots = {
        model.variant.name: [point for each in model.outcomes for point in each.curve.points]
        for model in results.models
        if len(model.outcomes) > 1
    }
    return draw_lines(lines, title, path, log=True, bands=bands, dots=dots)


def begun(results: TextResults) -> dict[str, tuple[Run, Curve]]:
    """Find the furthest curve of each model of which no training is finished."""
    done = {each.run.variant for each in results.outcomes}
    found: dict[str, tuple[Run, Curve]] = {}
    for run, curve in results.begun.items():
        if run.variant not in done and curve.points:
            found.setdefault(run.variant.name, (run, curve))
    return found


def line_of(model: SeedAggregate) -> list[tuple[int, float]]:
    """Compute the mean curve, which ends without a number where a seed diverged first."""
    end = min(model.diverged.values(), default=0)
    return [*((x, y.mean) for x, y in model.curve), *([(end, math.nan)] if end else [])]
