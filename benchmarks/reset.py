"""Measures the cost of a reset in a training layer of RoBERTa-base.

With a reset, pairs with the first token use rows of their own in a table by distance. The cost is
near one percent, and two equal layers that lie at different places in memory differ by as much. So
the same layer is timed with its reset and without it, in turns, in several processes: in each of
them, it lies elsewhere.

    python benchmarks/reset.py --encodings shaw m4m
"""

from __future__ import annotations

from measuring.process import restart_with_settings, silence_logging

if __name__ == "__main__":
    restart_with_settings()  # of the allocator and of logs, which torch reads when imported

import argparse
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from statistics import median

from torch import nn

from fairseq_posenc.encodings.distance_table import DistanceTable
from fairseq_posenc.errors import UserError
from measuring import timing
from measuring.commands import add_training_options, new_parser, prepare, run_script
from measuring.contenders import Contender, encoding_contenders
from measuring.families import Case
from measuring.page import Rows
from measuring.scopes import layer_and_modules


def parse_args(words: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = new_parser(__doc__)
    encodings = ["raffel", "shaw", "m4", "m4m", "deberta", "tupe"]
    add_training_options(parser, encodings, accepted="specs, timed with and without +reset")
    add = parser.add_argument
    add("--length", type=int, default=512, help="tokens (default: 512)")
    add("--processes", type=int, default=5, help="fresh processes, one at a time (default: 5)")
    return parser.parse_args(words)


# A measurement of an encoding in one process: the contender, the seconds of a pass without the
# reset, and the seconds with it divided by the seconds without it. A plain tuple, because it is
# pickled, and another process cannot import a class of a script.
ResetTime = tuple[Contender, float, float]


@contextmanager
def without_reset(modules: nn.Module, encoding: str) -> Iterator[None]:
    """Remove the resets of all tables, and put them back at the end.

    Raises:
        UserError: no table by distance has a reset.
    """
    tables = [module for module in modules.modules() if isinstance(module, DistanceTable)]
    kept = [(table, table.reset) for table in tables if table.reset is not None]
    if not kept:
        raise UserError(f"--encodings {encoding}: no table by distance has a reset")
    for table, _ in kept:
        table.reset = None
    try:
        yield
    finally:
        for table, reset in kept:
            table.reset = reset


def run_without_reset(run: timing.Pass, modules: nn.Module, encoding: str) -> None:
    """Run a pass of modules without their resets; to find and remove them takes little time."""
    with without_reset(modules, encoding):
        run()


def measure_in_this_process(args: argparse.Namespace) -> list[ResetTime]:
    """Measure each encoding in this process."""
    prepare(args)
    case = Case.from_args(args)
    times = []
    for encoding in args.encodings:
        spec = f"{encoding}+reset"
        (contender,) = encoding_contenders([spec], ["auto"], case.dims, case.call)
        run, modules = layer_and_modules(contender, case)
        run_plain = partial(run_without_reset, run, modules, encoding)
        # In this order a machine that slows down affects both equally.
        turns: list[timing.Pass] = [run_plain, run, run, run_plain]
        rounds = timing.interleaved(turns, args.device, args.rounds, args.seconds)
        ratio = median(
            (reset + reset_again) / (plain + plain_again)
            for plain, reset, reset_again, plain_again in rounds
        )
        contender = contender._replace(encoding=encoding)  # without +reset, as in the options
        times.append((contender, timing.median(rounds, turns.index(run_plain)), ratio))
    return times


def measure(args: argparse.Namespace) -> Rows:
    """Measure a row for each encoding: the median over the processes, and both extremes."""
    spawn = get_context("spawn")
    # The processes inherit the settings of this one, but do not run its first lines.
    with ProcessPoolExecutor(1, spawn, initializer=silence_logging, max_tasks_per_child=1) as pool:
        return summarize(args, list(pool.map(measure_in_this_process, [args] * args.processes)))


def summarize(args: argparse.Namespace, by_process: list[list[ResetTime]]) -> Rows:
    """Summarize the ratios of all processes: a row for each encoding."""
    rows = []
    for times in zip(*by_process, strict=True):  # of an encoding in all processes
        contender, _, _ = times[0]
        ratios = [ratio for _, _, ratio in times]
        rows.append(
            {
                "encoding": contender.encoding,
                "backend": contender.backend,
                "length": args.length,
                "dropout": args.dropout,
                "seconds": median(seconds for _, seconds, _ in times),
                "ratio": median(ratios),
                "lowest": min(ratios),
                "highest": max(ratios),
            }
        )
    return rows


if __name__ == "__main__":
    run_script("reset", parse_args, measure)
