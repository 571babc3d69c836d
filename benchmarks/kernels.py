"""What the Triton kernels cost by their machine code: no GPU is needed.

Compiles every kernel in each of its forms, and reads from the machine code what a pair of query and
key costs. ``measuring/machine_code.py`` says how that is counted.

    python benchmarks/kernels.py                    # bfloat16, heads of 64, sm_90
    python benchmarks/kernels.py --arch 80 90 --forms shaw m4m --json

The estimate of a layer's attention divides all instructions by a rate that is stated, not measured.
It leaves out memory, the waiting for it, and all that is not one of our kernels.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterable
from typing import Any

import torch

from fairseq_posenc.workbench.results.markdown import table
from measuring.commands import DTYPES, new_parser
from measuring.machine_code import KINDS, Code, Kernel, full_width, read_codes
from measuring.offline import FORMS, compile_form

RATE = 2.9e13  # instructions of single lanes in a second: 132 x 128 of them at 1.7 GHz (H100, H200)
PAIRS = 32 * 12 * 512 * 512  # of one layer of RoBERTa-base, 32 sentences of 512 tokens
COLUMNS = ["total", *KINDS, "integer"]


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("--arch", nargs="+", type=int, default=[90], help="80, 90, 100 (default: 90)")
    add("--forms", nargs="+", choices=FORMS, default=list(FORMS), help="(default: all)")
    add("--dropout", nargs="+", type=float, default=[0.1, 0.0], help="(default: 0.1 and 0)")
    add("--reset", nargs="+", type=int, default=[0], help="0, 1 or both (default: 0)")
    add("--dtype", choices=DTYPES, default="bfloat16", help="(default: bfloat16)")
    add("--width", type=int, default=64, help="of a head (default: 64)")
    add("--rate", type=float, default=RATE, help=f"of lane instructions (default: {RATE:g})")
    add("--pairs", type=float, default=PAIRS, help=f"of a layer (default: {PAIRS:g})")
    add("--json", action="store_true", help="print JSON, and nothing else")
    return parser.parse_args()


def compile_rows(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Compile what is asked for; return a row for each kernel."""
    dtype = DTYPES[args.dtype]
    kernels = [
        (arch, kernel)
        for arch, form, dropout, reset in itertools.product(
            args.arch, args.forms, args.dropout, args.reset
        )
        for kernel in compile_form(form, arch, dropout > 0, bool(reset), dtype, args.width)
    ]
    codes = read_codes(kernel for _, kernel in kernels)
    return [_describe(arch, kernel, codes[kernel.name]) for arch, kernel in kernels]


def _describe(arch: int, kernel: Kernel, code: Code) -> dict[str, Any]:
    return {
        "arch": arch,
        **{key: getattr(kernel, key) for key in ("form", "dropout", "reset", "kernel")},
        **{key: getattr(code, key) for key in ("registers", "spilled", "shared_bytes", "matrix")},
        "full_width": full_width(code, arch),
        **{kind: round(code.pairs[kind], 2) for kind in COLUMNS},
    }


def sum_forms(rows: Iterable[dict[str, Any]], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Compute the sums over the kernels of each form, with the time that they stand for."""
    forms = []
    key = ("arch", "form", "dropout", "reset")
    for case, kernels in itertools.groupby(rows, lambda row: tuple(row[name] for name in key)):
        each = list(kernels)
        total = sum(row["total"] for row in each)
        forms.append(
            {
                **dict(zip(key, case)),
                "instructions": round(total, 1),
                "spilled": sum(row["spilled"] for row in each),
                "full_width": all(row["full_width"] for row in each),
                "milliseconds": round(1e3 * total * args.pairs / args.rate, 3),
            }
        )
    return forms


def tables(rows: list[dict[str, Any]], totals: list[dict[str, Any]]) -> list[str]:
    """Format both tables."""
    texts = ["arch", "form", "dropout", "reset", "kernel"]
    header = [*texts, "registers", "spilled", "shared_bytes", "full_width", *COLUMNS]
    totals_header = list(totals[0])
    return [
        table(header, ([_format(row[x]) for x in header] for row in rows), "lllllr"),
        "",
        table(totals_header, ([_format(x) for x in row.values()] for row in totals), "llllr"),
    ]


def _format(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.1f}" if isinstance(value, float) and value >= 1 else str(value)


def main() -> None:
    """Compile, count, and print."""
    args = parse_args()
    torch.manual_seed(0)
    rows = compile_rows(args)
    totals = sum_forms(rows, args)
    if args.json:
        print(json.dumps({"kernels": rows, "sums": totals}, indent=1))
    else:
        print("\n".join(tables(rows, totals)))


if __name__ == "__main__":
    main()
