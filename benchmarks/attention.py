"""Time and memory of attention, layers and models with position encodings, against fairseq's own.

Four scopes: ``op``, the attention operation on projected queries, keys and values; ``layer``, a
whole encoder layer of RoBERTa-base; ``causal``, a causal LM layer of that size; ``model``, a whole
RoBERTa-base update or validation step in fairseq's trainer. Two baselines: ``stock``, fairseq's own
classes, and ``none``, ours without positions on the same backend. All passes take turns; each round
gives the ratio of a pass's time to the baseline's, and the table shows the median over the rounds.

    python benchmarks/attention.py --lengths 512 --modes training --seconds 12  # less than a minute
    python benchmarks/attention.py --encodings all --save layer_cpu
"""

from __future__ import annotations

from measuring.process import restart_with_settings

if __name__ == "__main__":
    restart_with_settings()  # of the allocator and of logs, which torch reads when imported

import argparse
import sys
from collections.abc import Iterator
from itertools import product

from measuring import commands, page
from measuring.compare import compare
from measuring.contenders import backend_names
from measuring.families import ROBERTA_BASE, Case
from measuring.scopes import SCOPES

LENGTHS = [128, 512, 1024, 2048, 4096]


def parse_args(words: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = commands.new_parser(__doc__)
    commands.add_training_options(parser, ["rope", "shaw", "m4m"])
    add = parser.add_argument
    add("--scopes", nargs="+", choices=SCOPES, default=["layer"], help="see above (default: layer)")
    modes = ["forward", "training"]
    add("--modes", nargs="+", choices=modes, default=modes, help="passes to time (default: both)")
    commands.add_backends(parser)
    add("--lengths", nargs="+", type=int, default=LENGTHS, help="tokens (default: 128 to 4096)")
    layers_help = "layers of the model in scope model (default: 2 on the CPU, 12 on a GPU)"
    add("--layers", type=int, help=layers_help)
    write_docs_help = "measure nothing; rewrite docs/benchmarks.md from docs/results"
    add("--write-docs", action="store_true", help=write_docs_help)
    return parser.parse_args(words)


def build_cases(args: argparse.Namespace) -> Iterator[tuple[str, Case]]:
    """Yield the scope and the case of each table row's measurement."""
    size = ROBERTA_BASE._replace(layers=args.layers or (12 if args.device.type == "cuda" else 2))
    for scope, mode, length in product(args.scopes, args.modes, args.lengths):
        dropout = args.dropout if mode == "training" else 0.0
        family = "causal_lm" if scope == "causal" else "masked_lm"
        case = Case.from_args(args, length=length, dropout=dropout, mode=mode)
        yield scope, case._replace(family=family, size=size)


def measure(args: argparse.Namespace) -> page.Rows:
    """Measure all cases of the command line."""
    backends = backend_names(args.backends)
    rows: page.Rows = []
    for scope, case in build_cases(args):
        print(f"{scope} {case.mode} n={case.length} ...", file=sys.stderr, flush=True)
        encodings = case.encodings(args.encodings)
        rows += compare(scope, case, encodings, backends, args.rounds, args.seconds)
    return rows


if __name__ == "__main__":
    if parse_args(sys.argv[1:]).write_docs:
        commands.exit_on_error(page.write_page)
    else:
        commands.run_script("attention", parse_args, measure)
