"""Gives a trained causal LM other positions and trains it on: how much of its quality returns?

    python benchmarks/continued_training.py FOLDER --specs own none alibi --train train.txt \
        --valid valid.txt --updates 100 --out continued.json

All trainings begin with the weights of the folder and read the same blocks of the same text in the
same order. Perplexity is that of blocks spread over the validation text. The same command
continues after a stop, and with more --updates it continues finished trainings. Each model is
kept in a folder beside the record, for `fairseq-posenc lm-length` and `benchmarks/needle.py`.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

from fairseq_posenc.errors import UserError
from fairseq_posenc.hf import read_positions, set_positions
from fairseq_posenc.hf.saving import load_model
from fairseq_posenc.workbench.experiments.length import hf_model
from fairseq_posenc.workbench.experiments.length.stream import spread_windows
from fairseq_posenc.workbench.results import pictures
from fairseq_posenc.workbench.results.differences import compare
from fairseq_posenc.workbench.results.intervals import interval_of_perplexity
from fairseq_posenc.workbench.results.record import Record, Row
from fairseq_posenc.workbench.running import options
from fairseq_posenc.workbench.running.devices import choose_device
from fairseq_posenc.workbench.running.files import checksum
from fairseq_posenc.workbench.running.jobs import ALONE, Inputs, Outputs, RunContext
from measuring.commands import existing_file, exit_on_error, new_parser, own_command
from measuring.trained_models import Training, checksum_weights, train_all, versions

MARGIN = 1.05  # room above and below the lines of the picture
MODEL = "model"  # name of the trained model's folder, inside that of its training


def parse_args(words: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("folder", type=Path, help="a causal language model of transformers, with its tokenizer")
    add("--specs", nargs="+", required=True, metavar="SPEC", help="the first is compared with")
    add("--train", type=existing_file, required=True, metavar="FILE", help="text to train on")
    valid = "text of the perplexities"
    add("--valid", type=existing_file, required=True, metavar="FILE", help=valid)
    options.add_count(parser, "--updates", "of each training", 100)
    options.add_count(parser, "--every", "updates between two evaluations", 25)
    options.add_count(parser, "--length", "tokens of an update, a row", 1024)
    options.add_count(parser, "--blocks", "of the validation text", 8)
    add("--lr", type=float, default=2e-4, help="learning rate (default: %(default)s)")
    add("--seed", type=int, default=1, help="of the order and new parameters (default: 1)")
    add("--bf16", action="store_true", help="train in autocast to bfloat16; all else in float32")
    options.add_device(parser)
    add("--out", type=Path, required=True, metavar="FILE", help="the record; models lie beside it")
    return parser.parse_args(words)


def draw_rows(tokens: Tensor, length: int, seed: int) -> list[Tensor]:
    """Cut a text into rows, ``(length,)``, in random order."""
    rows = [*tokens[: len(tokens) // length * length].view(-1, length)]
    random.Random(seed).shuffle(rows)
    return rows


def train(
    args: argparse.Namespace, spec: str, folder: Path, context: RunContext = ALONE
) -> Outputs:
    """Train the model with the positions of a spec; return figures and curves."""
    torch.manual_seed(args.seed)
    model = load_model(args.folder, dtype=torch.float32)
    stock = model.num_parameters()
    set_positions(model, spec)
    added = model.num_parameters() - stock
    device = choose_device(args.device)
    model.to(device)
    text = hf_model.tokenize_text(args.train, args.folder)
    rows = draw_rows(text.targets, args.length, args.seed)  # targets are all tokens of a text
    stream = hf_model.tokenize_text(args.valid, args.folder)
    if not rows or stream.size < args.length:
        raise UserError(f"--length {args.length}: a text is shorter")
    size = args.length  # of the stride as well: every token of a block is predicted
    windows = [
        *spread_windows(stream.size, length=size, stride=size, longest=size, count=args.blocks)
    ]

    def compute_loss(update: int) -> Tensor:
        ids = rows[update % len(rows)][None].to(device)
        with torch.autocast(device, torch.bfloat16, enabled=args.bf16):
            # With this mask, transformers 4 does not look for packed texts, and attention is fast.
            mask = torch.ones_like(ids)
            return model(input_ids=ids, attention_mask=mask, labels=ids, use_cache=False).loss

    def evaluate() -> Row:
        losses = {}
        for number, window in enumerate(windows, start=1):
            block = slice(window.start, window.end)
            read = stream.inputs[None, block].to(device)
            predicted = stream.targets[None, block].to(device)
            losses[f"loss_{number}"] = -float(hf_model.predict(model, read, predicted).mean())
        return losses

    training = Training(model, args.lr, folder)
    training.run(args.updates, args.every, compute_loss, evaluate)
    _save_with_tokenizer(model, args.folder, folder / MODEL)
    return {
        "position_encoding": read_positions(model),
        "new_parameters": added,
        "seconds_per_update": training.seconds / max(1, training.updates),
        "evaluations": training.evaluations,
        "training_losses": training.losses,
    }


def build_record(args: argparse.Namespace, outputs: Mapping[str, Outputs]) -> Record:
    """Collect perplexities with intervals over blocks, and differences to the first model."""
    rows: list[Row] = []
    curves: list[Row] = []
    losses: list[Row] = []
    first = next(iter(outputs.values()))
    of_first = {row["updates"]: _perplexities(row) for row in first["evaluations"]}
    for spec, trained in outputs.items():
        named = {"model": spec, "position_encoding": trained["position_encoding"]}
        for evaluation in trained["evaluations"]:
            if evaluation["updates"] not in of_first:
                continue
            perplexities = _perplexities(evaluation)
            change = compare(perplexities, of_first[evaluation["updates"]]).interval
            curves.append(
                {"model": spec, **evaluation}
                | interval_of_perplexity(perplexities.values()).figures("perplexity")
                | {name: math.exp(bound) for name, bound in change.figures("ratio").items()}
            )
        rows.append(
            {**named, **{k: v for k, v in curves[-1].items() if not k.startswith("loss_")}}
            | {name: trained[name] for name in ("new_parameters", "seconds_per_update")}
        )
        losses += [
            {"model": spec, "update": update, "loss": loss}
            for update, loss in enumerate(trained["training_losses"], start=1)
        ]
    data = {
        "model": str(args.folder),
        "train": str(args.train),
        "valid": str(args.valid),
        "tokens_per_update": args.length,
        "lr": args.lr,
        "training_in": "autocast to bfloat16" if args.bf16 else "float32",
        "device": choose_device(args.device),
        **versions(),
    }
    figures = {"models": rows, "curves": curves, "training": losses}
    return Record("continued", figures, data, seed=args.seed, command=own_command())


def draw(curves: Sequence[Row], path: Path) -> None:
    """Draw perplexity over updates, a line for each spec, as PNG."""
    lines = {
        spec: pictures.Line.over_seeds(
            [[(row["updates"], row["perplexity"]) for row in curves if row["model"] == spec]]
        )
        for spec in dict.fromkeys(row["model"] for row in curves)
    }
    figure, (axes,) = pictures.new_panels(1, 1, (7.6, 4.4))
    values = [row["perplexity"] for row in curves]
    pictures.style_values(axes, min(values) / MARGIN, max(values) * MARGIN, log=True)
    pictures.draw_lines(axes, lines, marker="o", ms=3.5)
    axes.set_xlabel("updates", color=pictures.GREY)
    axes.set_ylabel("perplexity per token", color=pictures.GREY)
    pictures.save(figure, path)


def _perplexities(evaluation: Row) -> dict[int, float]:
    """Read the perplexity of each block."""
    losses = [value for name, value in evaluation.items() if name.startswith("loss_")]
    return {number: math.exp(loss) for number, loss in enumerate(losses)}


def _save_with_tokenizer(model: PreTrainedModel, source: Path, folder: Path) -> None:
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)


def _collect_inputs(args: argparse.Namespace, spec: str) -> Inputs:
    names = ("every", "length", "blocks", "lr", "seed", "bf16")
    return {
        "weights": checksum_weights(args.folder),
        "texts": [checksum(args.train), checksum(args.valid)],
        "spec": spec,
        "device": choose_device(args.device),
        **{name: getattr(args, name) for name in names},
    }


def main() -> None:
    """Train with each spec, and draw the curves."""
    args = parse_args(sys.argv[1:])
    record = train_all(args, train, _collect_inputs, build_record)
    if pictures.can_draw():
        draw(record.figures["curves"], args.out.with_suffix(".png"))


if __name__ == "__main__":
    exit_on_error(main)
