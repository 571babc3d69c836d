"""Time and memory of attention with position encodings, against fairseq's own attention.

Four scopes: ``op``, the attention operation on projected queries, keys and values; ``layer``, a
whole encoder layer of RoBERTa-base; ``causal``, a causal LM layer of that size; ``model``, a whole
RoBERTa-base update or validation step in fairseq's trainer. Two baselines: ``stock``, fairseq's own
classes, and ``none``, ours without positions on the same backend. All passes take turns; a ratio is
the median over the rounds.

    python benchmarks/attention.py --quick          # a table in less than a minute
    python benchmarks/attention.py --encodings all --save layer_cpu
"""

from __future__ import annotations

from measuring.process import begin

if __name__ == "__main__":
    begin()

import argparse
import json
import sys
from collections.abc import Iterator
from functools import partial

import torch

from measuring import commands, page
from measuring.compare import compare
from measuring.contenders import backend_names
from measuring.families import BASE, FAMILIES, Case
from measuring.scopes import SCOPES

LENGTHS = [128, 512, 1024, 2048, 4096]
FEW = ["rope", "shaw", "m4m"]
QUICK = {
    "scopes": ["layer"],
    "modes": ["training"],
    "lengths": [512],
    "dropout": 0.1,
    "batch": 1,
    "rounds": 7,
    "encodings": FEW,
}
NOT_IN_JSON = ("memory", "ratio_to_none")
QUICK_SECONDS = 12.0  # time for timing; start, warm-up and memory take the rest of a minute


def parse_args(words: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = commands.new_parser(__doc__)
    commands.add_common(parser, FEW)
    add = parser.add_argument
    add("--scopes", nargs="+", choices=SCOPES, default=["layer"], help="(default: layer)")
    modes = ["forward", "training"]
    add("--modes", nargs="+", choices=modes, default=modes, help="(default: both)")
    commands.add_backends(parser)
    add("--lengths", nargs="+", type=int, default=LENGTHS, help="n (default: 128 to 4096)")
    layers = "of scope model (default: 2 on the CPU, 12 on a GPU)"
    add("--layers", type=int, help=layers)
    add("--quick", action="store_true", help="one table of a layer in less than a minute")
    docs = "measure nothing; rewrite docs/benchmarks.md from docs/results"
    add("--write-docs", action="store_true", help=docs)
    args = parser.parse_args(words)
    if args.quick:
        vars(args).update(QUICK)
    return args


def cases(args: argparse.Namespace) -> Iterator[tuple[str, Case]]:
    """Yield the cases to measure, each with its scope."""
    on_gpu = args.device.type == "cuda"
    batch = args.batch or (8 if on_gpu else 1)
    layers = args.layers or (12 if on_gpu else 2)
    dtype = getattr(torch, args.dtype)
    for scope in args.scopes:
        for mode in args.modes:
            for length in args.lengths:
                dropout = args.dropout if mode == "training" else 0.0
                case = Case(length, batch, dropout, dtype, args.device, mode)
                family = "causal_lm" if scope == "causal" else "masked_lm"
                yield scope, case._replace(family=family, size=BASE._replace(layers=layers))


def measure(args: argparse.Namespace) -> page.Rows:
    """Measure all cases of the command line."""
    backends = backend_names(args.backends)
    seconds = QUICK_SECONDS if args.quick else args.seconds
    rows: page.Rows = []
    for scope, case in cases(args):
        print(f"{scope} {case.mode} n={case.length} ...", file=sys.stderr, flush=True)
        encodings = FAMILIES[case.family].encodings(args.encodings)
        rows += compare(scope, case, encodings, backends, args.rounds, seconds)
    return rows


def format_json(rows: page.Rows) -> str:
    """Format our own rows as a JSON list of objects."""
    ours = [
        {name: value for name, value in row.items() if name not in NOT_IN_JSON}
        for row in rows
        if row["encoding"] != "stock"
    ]
    return json.dumps(ours, indent=1)


def main() -> None:
    """Measure, print, and keep the figures."""
    args = parse_args(sys.argv[1:])
    if args.write_docs:
        page.write_page()
        return
    commands.prepare(args)
    commands.report(
        args, "attention", measure(args), partial(page.format_table, "attention"), format_json
    )


if __name__ == "__main__":
    commands.exit_on_error(main)
