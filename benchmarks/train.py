"""Speed of whole training steps of fairseq's models, with each position encoding.

A step is fairseq's trainer's: forward, backward, clipping and Adam, on the dummy task of a family.
The utilization is the model's operations per second (`measuring/flops.py` has the formula) divided
by those of a large matrix product in the same run. All models take turns; `stock` is fairseq's own.

    python benchmarks/train.py --family causal_lm --size base --encodings rope shaw
"""

from __future__ import annotations

from measuring.process import restart_with_settings

if __name__ == "__main__":
    restart_with_settings()  # of the allocator and of logs, which torch reads when imported

import argparse
import sys

from measuring import timing
from measuring.commands import add_backends, add_training_options, new_parser, run_script
from measuring.compare import measure_in_groups
from measuring.contenders import STOCK, Contender, backend_names, contenders
from measuring.families import FAMILIES, Case, build, trainer_step
from measuring.flops import build_ceiling, model_flops
from measuring.page import Rows


def parse_args(words: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = new_parser(__doc__)
    add_training_options(parser, ["learned", "rope", "shaw", "m4m"])
    add = parser.add_argument
    add("--family", choices=FAMILIES, default="masked_lm", help="(default: masked_lm)")
    sizes = ["tiny", "base", "large"]
    add("--size", choices=sizes, default="base", help="fairseq's, or tiny for a try")
    add("--layers", type=int, help="in place of the size's own")
    add("--length", type=int, default=512, help="tokens of a sentence (default: 512)")
    add_backends(parser)
    return parser.parse_args(words)


def build_case(args: argparse.Namespace) -> Case:
    """Build the case: the model and its batch."""
    size = FAMILIES[args.family].sizes[args.size]
    size = size._replace(layers=args.layers or size.layers)
    return Case.from_args(args, family=args.family, size=size)


def measure(args: argparse.Namespace) -> Rows:
    """Measure a row for stock, and one for each encoding on each backend."""
    case = build_case(args)
    encodings = case.encodings(args.encodings)
    ours = contenders(encodings, backend_names(args.backends), case.dims, case.call)
    _, task, _ = build(STOCK, case)
    flops = model_flops(case, len(task.source_dictionary))
    return measure_in_groups(ours, lambda group: _measure(args, case, [STOCK, *group], flops))


def _measure(args: argparse.Namespace, case: Case, group: list[Contender], flops: int) -> Rows:
    names = ", ".join(contender.encoding for contender in group)
    print(f"{case.family}: {names} ...", file=sys.stderr, flush=True)
    product, product_flops = build_ceiling(case.dtype, case.device)
    passes = [*(trainer_step(contender, case) for contender in group), product]
    rounds = timing.interleaved(passes, case.device, args.rounds, args.seconds)
    peak_flops = product_flops / timing.median(rounds, -1)  # per second
    rows = []
    for index, contender in enumerate(group):
        seconds = timing.median(rounds, index)
        rows.append(
            {
                "family": case.family,
                "layers": case.size.layers,
                "device": case.device.type,
                "encoding": contender.encoding,
                "backend": contender.backend,
                "length": case.length,
                "batch": case.batch,
                "dropout": case.dropout,
                "dtype": args.dtype,
                "seconds": seconds,
                "tokens_per_second": case.batch * case.length / seconds,
                "ratio": timing.ratio(rounds, index, 0),
                "flops": flops / seconds,
                "utilization": flops / seconds / peak_flops,
            }
        )
    return rows


if __name__ == "__main__":
    run_script("train", parse_args, measure)
