"""Whether a small RoBERTa stays free of NaN for some hundred updates, with each encoding.

fairseq's trainer on its dummy task, with a learning rate that moves the weights. fp16 skips updates
whose gradients overflow, as fairseq does; what must stay finite is the loss and all weights.

    python benchmarks/survive.py --device cuda --dtype float16 --backends triton --encodings all
"""

from __future__ import annotations

from measuring.process import begin

if __name__ == "__main__":
    begin()

import argparse
import math
import sys
from typing import Any

import torch

from fairseq_posenc import registry
from fairseq_posenc.backends.base import Call
from fairseq_posenc.errors import UserError
from fairseq_posenc.reporting.markdown import table
from measuring.commands import DTYPES, add_common, prepare, report, told
from measuring.contenders import Contender, backend_names, contenders
from measuring.families import FAMILIES, Whole, trainer_of


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common(parser, ["shaw", "m4", "m4m"])
    parser.add_argument("--updates", type=int, default=300, help="(default: 300)")
    parser.add_argument("--length", type=int, default=128, help="(default: 128)")
    backends = "names, auto (what the package would choose) or all (default: auto)"
    parser.add_argument("--backends", nargs="+", default=["auto"], metavar="NAME", help=backends)
    return parser.parse_args()


def survive(contender: Contender, whole: Whole, updates: int) -> dict[str, Any]:
    """Train, and return what became of it."""
    trainer, batch = trainer_of(contender, whole, lr=1e-3)
    losses = []
    for _ in range(updates):
        log = trainer.train_step([batch])
        losses.append(float("nan") if log is None else float(log["loss"]))
    finite = all(bool(x.isfinite().all()) for x in trainer.model.parameters())
    seen = [x for x in losses if not math.isnan(x)]  # NaN: an update that was skipped
    return {
        **{"encoding": contender.encoding, "backend": contender.backend},
        **{"updates": updates, "skipped": updates - len(seen), "finite": finite and bool(seen)},
        **{"first": seen[0] if seen else None, "last": seen[-1] if seen else None},
    }


def rows_table(rows: list[dict[str, Any]]) -> str:
    """Return the table of what became of each."""
    header = list(rows[0])
    return table(header, ([str(x) for x in row.values()] for row in rows), "llr")


def main() -> None:
    """Train with each encoding in turn, and fail if one does not survive."""
    args = parse_args()
    prepare(args)
    shared = args.length, args.batch or 8, args.dropout, DTYPES[args.dtype], args.device
    whole = Whole("masked_lm", FAMILIES["masked_lm"].sizes["tiny"], *shared, vocabulary=1_000)
    names = registry.names_for(encoder=True) if args.encodings == ["all"] else args.encodings
    sizes = (args.length, args.length, whole.dims.head_dim)
    call = Call(args.device.type, whole.dtype, *sizes, dropout=args.dropout > 0)
    rows = []
    for contender in contenders(names, backend_names(args.backends), whole.dims, call):
        print(f"{contender.encoding}, {contender.backend} ...", file=sys.stderr, flush=True)
        torch.manual_seed(1)
        rows.append(survive(contender, whole, args.updates))
    args.save = None
    report(args, "survive", rows, rows_table)
    if not all(row["finite"] for row in rows):
        raise UserError("not every encoding survived")


if __name__ == "__main__":
    told(main)
