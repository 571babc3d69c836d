"""The table model x encoding: every cell is tried, on tiny models with random weights.

A cell holds the largest difference between two ways to compute the same logits (padding on both
sides, a cache, a reloaded model; also generation, greedy, sampled and by beams, which must be the
same token by token), as a part of the largest logit, or the line of its refusal:

    python -m tests.hf.matrix --out matrix.md
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

import transformers

from fairseq_posenc.errors import UserError
from fairseq_posenc.hf import set_positions
from tests.helpers.hf_models import MODELS, Cell, checks_of, compute_logits, distance, make_inputs
from tests.hf.test_cells import SPECS

LARGEST = 2e-5


def try_cell(name: str, spec: str) -> str:
    """Try a model with an encoding; return the largest difference, the refusal, or what failed."""
    try:
        cell = Cell.build(name, spec)
    except UserError as error:
        return f"refused: {error}"
    figures = [compare_with_own(name)] if spec == "own" else []
    for check, compute in checks_of(cell):
        result = compute()
        if isinstance(result, bool):
            result = 0.0 if result else float("inf")
        if not result < LARGEST:
            return f"FAILED: {check} differs by {result:.1e}"
        figures.append(result)
    gradients = cell.gradients().items()
    untrained = [key for key, x in gradients if ".positions." in f".{key}" and not x.any()]
    if untrained:
        return f"FAILED: no gradient of {', '.join(untrained)}"
    return f"{max(figures):.0e}"


def compare_with_own(name: str) -> float:
    """Compare a model that was given its own positions with the model as it was."""
    tiny = MODELS[name]
    model, inputs = tiny.build(), make_inputs(tiny)
    before = compute_logits(model, inputs)
    return distance(compute_logits(set_positions(model, "own"), inputs), before)


def write_table(models: Iterable[str], specs: Iterable[str]) -> str:
    """Try all cells; write a row of Markdown for each spec, with the refusals below the table."""
    models, specs = list(models), list(specs)
    refusals: dict[str, int] = {}  # lines and their numbers
    refused = 0
    rows = ["| spec | largest difference | refused by |", "| --- | ---: | --- |"]
    for spec in specs:
        figures, refusing = [], []
        for name in models:
            text = try_cell(name, spec)
            print(f"{name} {spec}: {text}", file=sys.stderr, flush=True)
            line = text.removeprefix("refused: ")
            if line == text:
                figures.append(text)
            else:
                refusing.append(f"{name} ({refusals.setdefault(line, len(refusals) + 1)})")
        refused += len(refusing)
        failed = [text for text in figures if text.startswith("FAILED")]
        largest = "; ".join(failed) or max(figures, key=float, default="-")
        rows.append(f"| `{spec}` | {largest} | {', '.join(refusing)} |")
    notes = [f"{number}. {line}" for line, number in refusals.items()]
    cells = len(models) * len(specs)
    count = f"{cells:,} cells, of which {refused} ({refused / cells:.1%}) are refused."
    lines = [f"## transformers {transformers.__version__}", "", count, "", *rows, "", *notes, ""]
    return "\n".join([*lines, f"Models: {', '.join(models)}."]).rstrip() + "\n"


def main() -> None:
    """Try the cells that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="*", default=[*MODELS], choices=[*MODELS], metavar="NAME")
    parser.add_argument("--specs", nargs="*", default=["own", *SPECS], metavar="SPEC")
    parser.add_argument("--out", type=Path, metavar="FILE")
    args = parser.parse_args()
    table = write_table(args.models, args.specs)
    print(table)
    if args.out is not None:
        args.out.write_text(table, encoding="utf-8")


if __name__ == "__main__":
    main()
