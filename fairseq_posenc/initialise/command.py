"""``fairseq-posenc init``."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from fairseq_posenc.initialise.matching import RULES, Parameter, Start, match
from fairseq_posenc.initialise.target import SIZES, Choice, arguments, build, training_options
from fairseq_posenc.running.checkpoints import write_state
from fairseq_posenc.running.options import add_count
from fairseq_posenc.running.pretrained import Pretrained, read_pretrained
from fairseq_posenc.running.starts import check_out, start_of
from fairseq_posenc.transformer.options import resolve


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``fairseq-posenc init``."""
    parser.add_argument(
        "--from",
        dest="source",
        type=Path,
        required=True,
        metavar="FILE",
        help="checkpoint of a RoBERTa: a released one, fairseq's, or ours",
    )
    parser.add_argument("--arch", required=True, metavar="NAME", help="as in roberta_m4m")
    parser.add_argument("--position-encoding", metavar="SPEC", help="default: the architecture's")
    parser.add_argument("--attention-directions", metavar="LIST", help="as in lr,rl; likewise")
    add_count(parser, "--max-positions", "default: the source's")
    parser.add_argument(
        "--extend", choices=RULES, help="how tables by position become longer (default: refuse)"
    )
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of what is new (1)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: NAME.pt")
    parser.add_argument("--overwrite", action="store_true", help="replace an older --out")


def run(options: argparse.Namespace) -> int:
    """Write a start checkpoint and print what became of each position parameter.

    Raises:
        UserError: see the parts' own.
    """
    out = options.out or Path(f"{options.arch}.pt")
    check_out("--out", out, options.overwrite)
    source = read_pretrained(options.source, "--from", with_weights=True)
    choice = Choice(
        options.arch, options.position_encoding, options.attention_directions, options.max_positions
    )
    args = arguments(choice, source)
    model = build(args, source.symbols, options.seed)
    start = match(source, model, options.extend)
    write_state(_checkpoint(source, args, start), out)
    print(_account(source, args, start, out))
    return 0


def _checkpoint(source: Pretrained, args: argparse.Namespace, start: Start) -> dict[str, Any]:
    settings: Any = OmegaConf.to_container(source.settings, resolve=True, enum_to_str=True)
    return start_of({**settings, "model": args}, start.weights)


def _account(source: Pretrained, args: argparse.Namespace, start: Start, out: Path) -> str:
    layers, width, *_ = (getattr(source.args, name) for name in SIZES)
    lines = [
        f"source: {source.path}: {source.arch}, {layers} layers of width {width}, "
        f"{source.max_positions} positions, {source.symbols:,} symbols, positions: {source.spec}",
        f"kept bit for bit: the {len(start.kept)} tensors that are no positions",
        *map(_line, start.positions),
    ]
    if start.heads:
        lines.append(f"left out, as they belong to a task: {', '.join(start.heads)}")
    positions = resolve(args)
    directions = ",".join(positions.directions) or "both"
    words = ["--task", "masked_lm", "--criterion", "masked_lm"]
    words += ["--tokens-per-sample", str(args.max_positions), "--user-dir", "fairseq_posenc"]
    train = shlex.join([*words, *training_options(args), "--finetune-from-model", str(out)])
    return "\n".join(
        [
            *lines,
            f"wrote {out}: positions: {positions.encoder}, directions: {directions}",
            f"train from it, and resume, with the same command: fairseq-train DATA {train} ...",
        ]
    )


def _line(parameter: Parameter) -> str:
    return f"{parameter.name} {parameter.shape}: {parameter.fate}{parameter.note}"
