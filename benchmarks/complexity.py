"""Measures how costs grow with the length, for the encodings of the M4M paper's table 1.

A pass is a forward pass of self-attention with its input encodings, without gradients. The cost of
an encoding is the difference to ``none`` on the same backend: operations (2abc for a product of
``(a, b)`` and ``(b, c)``, and one for each number that other operations write), numbers held at the
peak, and time, measured in turns. A growth of p means that a cost grows 2^p times when n, or the
width of a head, doubles. The number of heads stays the same.

    python benchmarks/complexity.py --lengths 128 256    # seconds
    python benchmarks/complexity.py --threads 1 --save complexity_cpu    # ten minutes
"""

from __future__ import annotations

from measuring.process import restart_with_settings

if __name__ == "__main__":
    restart_with_settings()  # of the allocator and of logs, which torch reads when imported

import argparse
import math
import re
import sys
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from fairseq_posenc import registry, specs
from fairseq_posenc.analysis import costs
from fairseq_posenc.api import SelfAttention, StackPositions
from fairseq_posenc.encodings.base import Dims
from fairseq_posenc.errors import UserError
from fairseq_posenc.positions import Span
from measuring import timing
from measuring.commands import add_turns, new_parser, run_script
from measuring.contenders import make_positions
from measuring.growth import TABLE1, complexity_table
from measuring.page import Rows

SEED = 1
BYTES_PER_NUMBER = 4
COSTS: tuple[Literal["operations", "numbers"], ...] = ("operations", "numbers")
# Operations that write nothing.
UNWRITTEN = ("aten::empty", "aten::new_empty", "aten::_unsafe_view", "aten::_local_scalar_dense")


class Size(NamedTuple):
    """The sizes of one layer, and what computes its attention."""

    length: int
    width: int  # of a head
    heads: int
    backend: str


class WriteCounter(TorchDispatchMode):
    """Counts the numbers that operations write, without matrix products, which torch counts."""

    def __init__(self, matrix_products: Mapping[Any, Any]) -> None:
        super().__init__()
        self.matrix_products = matrix_products  # keys are operations of torch
        self.numbers = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        is_excluded = function.is_view or function._overloadpacket in self.matrix_products
        if not is_excluded and not function.name().startswith(UNWRITTEN):
            outputs = out if isinstance(out, (tuple, list)) else [out]
            self.numbers += sum(x.numel() for x in outputs if isinstance(x, torch.Tensor))
        return out


def parse_args(words: list[str]) -> argparse.Namespace:
    """Read the command line.

    Raises:
        UserError: fewer than two lengths or widths, which show no growth.
    """
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("--encodings", nargs="+", default=list(TABLE1), metavar="SPEC", help="(default: table 1's)")
    add("--lengths", nargs="+", type=int, default=[128, 256, 512, 1024, 2048], help="n")
    add("--widths", nargs="+", type=int, default=[64, 128], help="of a head (default: 64 128)")
    add("--heads", type=int, default=12, help="(default: 12)")
    backends = ["reference", "blocked"]
    add("--backends", nargs="+", default=backends, help=f"(default: {' '.join(backends)})")
    add_turns(parser)
    # `run_script` reads device and type, for which there are no options.
    parser.set_defaults(device=torch.device("cpu"), dtype="float32", rounds=5, seconds=20.0)
    args = parser.parse_args(words)
    for name in ("lengths", "widths"):
        values = sorted(set(getattr(args, name)))
        if len(values) < 2 or values[0] < 1:
            raise UserError(f"--{name}: give at least two, of 1 or more, as growth needs")
        setattr(args, name, values)
    return args


def build_pass(spec: str, size: Size) -> timing.Pass:
    """Build a forward pass of self-attention with the positions of a spec."""
    torch.manual_seed(SEED)
    embed_dim = size.heads * size.width
    positions = StackPositions(spec, embed_dim, size.heads, max_positions=size.length)
    layer = SelfAttention(positions, backend=size.backend).eval()
    positions.eval()
    x = torch.randn(1, size.length, embed_dim)

    def run() -> None:
        with torch.no_grad():
            layer(*positions(x))

    return run


def count_costs(run: timing.Pass) -> dict[str, int]:
    """Count the operations of a pass, and the numbers that it holds at its peak."""
    run()  # first, so that tensors that are made only once do not count
    with FlopCounterMode(display=False) as flops, WriteCounter(flops.flop_registry) as written:
        run()
    return {
        "operations": flops.get_total_flops() + written.numbers,
        "numbers": timing.peak(run, torch.device("cpu")) // BYTES_PER_NUMBER,
    }


class TableSizes(NamedTuple):
    """The sizes of an encoding's tables of vectors; a size is 0 if it has no such table."""

    rows: int  # u, the number of distinct rows of the longest table
    state_width: int  # w, the numbers of a row of :attr:`Terms.state_table`


def measure_tables(item: specs.Item, size: Size) -> TableSizes:
    """Measure the tables of an encoding in a layer."""
    n = size.length
    device = torch.device("cpu")
    dims = Dims(size.heads * size.width, size.heads, max_positions=n)
    encoding = registry.get(item.name)(dims, **dict(item.options))
    terms = encoding.terms(Span.from_lengths(n, n, device), make_positions(1, n, device))
    tables = [
        name for name, term, _ in terms.present() if term.rows is not None and term.has_vectors
    ]
    # Several distances share a row in `runs`; other tables have one for each of 2n - 1 distances.
    rows = [terms.runs[name].num_rows if name in terms.runs else 2 * n - 1 for name in tables]
    width = 0 if terms.state_table is None else terms.state_table.size(-1)
    return TableSizes(max(rows, default=0), width)


def evaluate_formulas(text: str, size: Size, tables: TableSizes) -> int:
    """Sum the formulas of a text, as in "``2 n h d`` for queries, and ``n^2 + u d``".

    A formula is a sum of products; the factors of a product are separated by spaces.
    """
    n, h, d = size.length, size.heads, size.width
    values = {"n": n, "h": h, "d": d, "C": h * d, "(2n-1)": 2 * n - 1}
    values |= {"u": tables.rows, "w": tables.state_width}
    values |= {f"{name}^2": values[name] ** 2 for name in "ndC"}
    products = (
        term.split() for formula in re.findall(r"``(.+?)``", text) for term in formula.split(" + ")
    )
    return sum(
        math.prod(int(factor) if factor.isdigit() else values[factor] for factor in factors)
        for factors in products
    )


def measure_size(encodings: list[str], size: Size, args: argparse.Namespace) -> Rows:
    """Measure a row for each encoding: costs beyond those of ``none``, and the ratio of times."""
    passes = [build_pass(spec, size) for spec in ("none", *encodings)]
    plain, *counted = (count_costs(run) for run in passes)
    times = timing.interleaved(passes, args.device, args.rounds, args.seconds)
    return [
        {
            "encoding": spec,
            **size._asdict(),
            **{name: counts[name] - plain[name] for name in COSTS},
            **_sum_formulas(spec, size),
            "seconds": timing.median(times, index),
            "ratio": timing.ratio(times, index, 0),
        }
        for index, (spec, counts) in enumerate(zip(encodings, counted), start=1)
    ]


def _sum_formulas(spec: str, size: Size) -> dict[str, int]:
    """Sum the formulas of a spec's encodings, by the name of their column."""
    measured = [(item.name, measure_tables(item, size)) for item in specs.parse(spec).items]
    return {
        f"formula_{quantity}": sum(
            evaluate_formulas(costs.describe_cost(name, quantity), size, tables)
            for name, tables in measured
        )
        for quantity in COSTS
    }


def measure(args: argparse.Namespace) -> Rows:
    """Measure every length with the first width, and the middle length with the other widths."""
    first, *others = args.widths
    middle = args.lengths[len(args.lengths) // 2]
    sizes = [(length, first) for length in args.lengths] + [(middle, width) for width in others]
    rows: Rows = []
    for backend in args.backends:
        for length, width in sizes:
            print(f"{backend} n={length} width={width} ...", file=sys.stderr, flush=True)
            size = Size(length, width, args.heads, backend)
            rows += measure_size(args.encodings, size, args)
    return rows


if __name__ == "__main__":
    run_script("complexity", parse_args, measure, complexity_table)
