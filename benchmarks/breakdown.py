"""Divides the time of an encoder layer into matrix products, random numbers, softmax and the rest.

The layers are of RoBERTa-base, in training: fairseq's own, and one with each encoding. torch's
profiler times them; it makes many small calls a little slower. All take turns; a figure is the
median over the rounds. With one thread, the times of all operations add up to the whole time.

    python benchmarks/breakdown.py --encodings none shaw m4m
"""

from __future__ import annotations

from measuring.process import restart_with_settings

if __name__ == "__main__":
    restart_with_settings()  # of the allocator and of logs, which torch reads when imported

import argparse
from statistics import median

from torch.profiler import ProfilerActivity, profile

from fairseq_posenc.errors import UserError
from measuring import timing
from measuring.commands import add_training_options, new_parser, run_script
from measuring.contenders import STOCK, encoding_contenders
from measuring.families import Case
from measuring.page import Rows
from measuring.scopes import SCOPES

PARTS = {  # column of the table -> names of torch's operations
    "products": {"mm", "addmm", "addmm_", "bmm", "baddbmm", "baddbmm_"},
    "random": {"bernoulli_", "random_"},
    "softmax": {"_softmax", "_softmax_backward_data"},
}


def parse_args(words: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = new_parser(__doc__)
    add_training_options(parser, ["none", "shaw", "m4m"])
    add = parser.add_argument
    add("--scope", choices=["op", "layer"], default="layer", help="(default: layer)")
    add("--length", type=int, default=512, help="n (default: 512)")
    parser.set_defaults(threads=1)
    return parser.parse_args(words)


def time_parts(run: timing.Pass) -> dict[str, float]:
    """Time a pass as a whole (``seconds``), each of its parts, and the ``rest``, in seconds."""
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        run()
    # The profiler reports microseconds.
    times = {event.key: event.self_cpu_time_total / 1e6 for event in profiled.key_averages()}
    parts = {
        part: sum(times.get(f"aten::{name}", 0.0) for name in names)
        for part, names in PARTS.items()
    }
    whole = sum(times.values())
    return {"seconds": whole, **parts, "rest": whole - sum(parts.values())}


def measure(args: argparse.Namespace) -> Rows:
    """Measure a row for stock, and one for each encoding.

    Raises:
        UserError: the device is a GPU, which runs operations asynchronously.
    """
    if args.device.type != "cpu":
        raise UserError("the parts can be timed on a CPU only: leave --device out")
    case = Case.from_args(args)
    encodings = case.encodings(args.encodings)
    group = [STOCK, *encoding_contenders(encodings, ["auto"], case.dims, case.call)]
    passes = [SCOPES[args.scope](contender, case) for contender in group]
    for run in passes:
        for _ in range(timing.WARM_UP):
            run()
    rounds = [[time_parts(run) for run in passes] for _ in range(args.rounds)]
    rows = []
    for index, contender in enumerate(group):
        times_by_round = [times[index] for times in rounds]
        ratios = [times[index]["seconds"] / times[0]["seconds"] for times in rounds]  # to stock
        rows.append(
            {
                "scope": args.scope,
                "encoding": contender.encoding,
                "backend": contender.backend,
                "length": case.length,
                "dropout": case.dropout,
                "ratio": median(ratios),
                **{name: median(times[name] for times in times_by_round) for name in rounds[0][0]},
            }
        )
    return rows


if __name__ == "__main__":
    run_script("breakdown", parse_args, measure)
