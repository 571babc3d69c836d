"""Measures the cost of ``position_ids``: self-attention in training, with and without them.

The columns are ``counted``, without ids; ``from_100``, with ids that grow by one, which cost as
much as counted tokens; and ``gaps``, with ids that grow by one, two or three, so that a table row
is looked up for each pair of a query and a key. All passes take turns. A column's ratio is the
median over the rounds of its time to that of ``counted``.

    python benchmarks/given_positions.py --threads 1
"""

from __future__ import annotations

from measuring.process import restart_with_settings

if __name__ == "__main__":
    restart_with_settings()  # of the allocator and of logs, which torch reads when imported

import argparse

import torch
from torch import Tensor

from fairseq_posenc.api import SelfAttention, StackPositions
from measuring import timing
from measuring.commands import add_training_options, new_parser, run_script
from measuring.families import ROBERTA_BASE, Case
from measuring.page import Rows

ENCODINGS = ["none", "rope", "alibi", "t5", "shaw", "m4m", "deberta_v2"]


def parse_args(words: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = new_parser(__doc__)
    add_training_options(parser, ENCODINGS)
    parser.add_argument("--length", type=int, default=512, help="n, tokens (default: 512)")
    return parser.parse_args(words)


def make_ids(batch: int, length: int) -> dict[str, Tensor | None]:
    """Make the ids of each column, ``(batch, length)``; the first column is the baseline."""
    generator = torch.Generator().manual_seed(1)
    steps = torch.randint(1, 4, (batch, length), generator=generator)
    return {
        "counted": None,
        "from_100": torch.arange(100, 100 + length).expand(batch, -1),
        "gaps": steps.cumsum(1),
    }


def build_pass(spec: str, ids: Tensor | None, case: Case) -> timing.Pass:
    """Build a training step of self-attention with its positions."""
    torch.manual_seed(1)
    max_positions = 3 * case.length + 100  # above the largest id of all columns
    positions = StackPositions(spec, ROBERTA_BASE.embed_dim, ROBERTA_BASE.num_heads, max_positions)
    positions.to(case.device, case.dtype)
    layer = SelfAttention(positions, dropout=case.dropout).to(case.device, case.dtype)
    size = (case.batch, case.length, ROBERTA_BASE.embed_dim)
    x = torch.randn(size, dtype=case.dtype, device=case.device, requires_grad=True)
    ids = None if ids is None else ids.to(case.device)

    def run() -> None:
        layer(*positions(x, position_ids=ids))[0].sum().backward()

    return run


def measure(args: argparse.Namespace) -> Rows:
    """Measure each spec without ids and with both kinds."""
    rows: Rows = []
    case = Case.from_args(args)
    columns = make_ids(case.batch, case.length)
    for spec in case.encodings(args.encodings):
        passes = [build_pass(spec, ids, case) for ids in columns.values()]
        rounds = timing.interleaved(passes, case.device, args.rounds, args.seconds)
        ratios = {
            name: timing.ratio(rounds, index, baseline=0) for index, name in enumerate(columns)
        }
        seconds = timing.median(rounds, 0)
        rows.append({"encoding": spec, "length": case.length, "seconds": seconds, **ratios})
    return rows


if __name__ == "__main__":
    run_script("given_positions", parse_args, measure)
