"""How many operations a forward pass starts, in each layer and once: no GPU is needed.

On a GPU each of them is at least one kernel, whose start costs microseconds however small it is.
Views and empty tensors start nothing, and are not counted. A layer's are those by which a model of
two layers exceeds one of one layer, at any width; of a translation model, it is one of each side.

    python benchmarks/launches.py                                  # all three families
    python benchmarks/launches.py --families masked_lm --encodings m4m --ops
"""

from __future__ import annotations

from measuring.process import begin

if __name__ == "__main__":
    begin()

import argparse
import json
import sys
from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fairseq_posenc import specs
from fairseq_posenc.backends.planner import BACKENDS
from fairseq_posenc.workbench.results.markdown import table
from measuring.commands import exit_on_error, new_parser
from measuring.contenders import STOCK, Contender
from measuring.families import FAMILIES, Case, build

ENCODINGS = ["none", "rope", "alibi", "t5", "shaw", "m4", "m4m", "deberta", "tupe"]
LAYERS = 12
NOTHING = (
    "aten::empty",
    "aten::new_empty",
    "aten::_local_scalar_dense",
    "aten::promote_types",
    "aten::_unsafe_view",
)


class Started(TorchDispatchMode):
    """Counts the operations that start something on a device, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = function.name().split(".")[0]
        if not function.is_view and not name.startswith(NOTHING):
            self.names[name.split("::")[1]] += 1
        return function(*args, **(kwargs or {}))


def forward_pass(contender: Contender, case: Case) -> Counter[str]:
    """Count the operations that a forward pass in training starts, by name."""
    _, task, model = build(contender, case)
    task.load_dataset("train")
    sample = task.dataset("train").collater([0])
    model.train()
    with Started() as started:
        model(**sample["net_input"])
    return started.names


def count(contender: Contender, case: Case) -> tuple[Counter[str], Counter[str]]:
    """Count the operations of one layer, and those of everything outside the layers."""
    one, two = (
        forward_pass(contender, case._replace(size=case.size._replace(layers=layers)))
        for layers in (1, 2)
    )
    layer = two - one
    return layer, one - layer


def count_rows(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Count a row for fairseq's own model of each family, and one for each encoding."""
    rows = []
    for name in args.families:
        family = FAMILIES[name]
        known = {"none", *family.encodings(["all"])}
        names = {spec: {item.name for item in specs.parse(spec).items} for spec in args.encodings}
        size = family.sizes["tiny"]
        shared = (args.length, 1, 0.1, torch.float32, torch.device("cpu"))
        case = Case(*shared, family=name, size=size, vocabulary=1_000)
        stock, stock_once = count(STOCK, case)
        given = [Contender(spec, args.backend) for spec, parts in names.items() if parts <= known]
        for each in [STOCK, *given]:
            layer, once = (stock, stock_once) if each == STOCK else count(each, case)
            total = once.total() + LAYERS * layer.total()
            row = {"family": name, "encoding": each.encoding, "backend": each.backend}
            row |= {"once": once.total(), "layer": layer.total(), f"of {LAYERS} layers": total}
            rows.append({**row, "added": dict(layer - stock), "saved": dict(stock - layer)})
    return rows


def rows_table(rows: list[dict[str, Any]], with_ops: bool) -> str:
    """Format the table, with what a layer starts beyond fairseq's own if that is asked for."""
    header = [name for name in rows[0] if with_ops or name not in ("added", "saved")]
    cells = ([_cell(row[name]) for name in header] for row in rows)
    return table(header, cells, "lllr")


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{n} {name}" for name, n in value.items())
    return str(value)


def parse_args(words: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES), help="(default: all)")
    add("--encodings", nargs="+", default=ENCODINGS, metavar="SPEC", help="specs")
    add("--backend", choices=["auto", *BACKENDS], default="auto", help="(default: auto)")
    add("--length", type=int, default=16, help="tokens of a sentence (default: 16)")
    add("--ops", action="store_true", help="what a layer starts beyond fairseq's own, and saves")
    add("--json", action="store_true", help="print the rows as JSON, and nothing else")
    return parser.parse_args(words)


def main() -> None:
    """Count, and print."""
    args = parse_args(sys.argv[1:])
    rows = count_rows(args)
    print(json.dumps(rows, indent=1) if args.json else rows_table(rows, args.ops))


if __name__ == "__main__":
    exit_on_error(main)
