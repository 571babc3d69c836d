"""The picture of a comparison: the learning curve of each model, over its seeds."""

from __future__ import annotations

import math
from pathlib import Path

from fairseq_posenc.workbench.experiments.aggregate import SeedAggregate
from fairseq_posenc.workbench.experiments.pipeline import Results
from fairseq_posenc.workbench.experiments.training import Run
from fairseq_posenc.workbench.results.learning_curves import draw_lines
from fairseq_posenc.workbench.running.logs import Curve


def draw(results: Results, title: str, path: Path) -> bool:
    """Draw means, intervals and seeds into a PNG file; say whether there is anything to draw."""
    curves = {model.contender.name: model.curve for model in results.models}
    lines = {model.contender.name: line_of(model) for model in results.models}
    lines |= {name: curve.points for name, (_, curve) in begun(results).items()}
    bands = {name: [(x, y.low, y.high) for x, y in curve] for name, curve in curves.items()}
    dots = {
        model.contender.name: [point for each in model.outcomes for point in each.curve.points]
        for model in results.models
        if len(model.outcomes) > 1
    }
    return draw_lines(lines, title, path, log=True, bands=bands, dots=dots)


def begun(results: Results) -> dict[str, tuple[Run, Curve]]:
    """Find the furthest curve of each model of which no training is finished."""
    done = {each.contender for each in results.outcomes}
    found: dict[str, tuple[Run, Curve]] = {}
    for run, curve in results.begun.items():
        if run.contender not in done and curve.points:
            found.setdefault(run.contender.name, (run, curve))
    return found


def line_of(model: SeedAggregate) -> list[tuple[int, float]]:
    """Compute the mean curve, which ends without a number where a seed diverged first."""
    end = min(model.diverged.values(), default=0)
    return [*((x, y.mean) for x, y in model.curve), *([(end, math.nan)] if end else [])]
