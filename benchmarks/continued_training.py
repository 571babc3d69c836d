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
from transformers import AutoTokenizer

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
from fairseq_posenc.workbench.running.jobs import Inputs, Outputs
from measuring.commands import existing_file, exit_on_error, new_parser, own_command
from measuring.trained_models import Training, checksum_weights, train_all, versions

MARGIN = 1.05  # room above and below the lines of the picture


def parse_args(words: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("folder", type=Path, help="a causal language model of transformers, with its tokenizer")
    add("--specs", nargs="+", required=True, metavar="SPEC", help="the first is the baseline")
    add("--train", type=existing_file, required=True, metavar="FILE", help="text to train on")
    valid = "text on which perplexity is measured"
    add("--valid", type=existing_file, required=True, metavar="FILE", help=valid)
    options.add_count(parser, "--updates", "updates of each training", 100)
    options.add_count(parser, "--every", "updates between two evaluations", 25)
    options.add_count(parser, "--length", "tokens of an update, and of a block", 1024)
    options.add_count(parser, "--blocks", "number of blocks of the validation text", 8)
    add("--lr", type=float, default=2e-4, help="learning rate (default: %(default)s)")
    add("--seed", type=int, default=1, help="for the order and new parameters (default: 1)")
    add("--bf16", action="store_true", help="train in autocast to bfloat16; all else in float32")
    options.add_device(parser)
    add("--out", type=Path, required=True, metavar="FILE", help="the record; models lie beside it")
    return parser.parse_args(words)


def draw_rows(tokens: Tensor, length: int, seed: int) -> list[Tensor]:
    """Cut a text into rows, ``(length,)``, in random order."""
    rows = [*tokens[: len(tokens) // length * length].view(-1, length)]
    random.Random(seed).shuffle(rows)
    return rows


def train(args: argparse.Namespace, spec: str, folder: Path) -> Outputs:
    """Train the model with the positions of a spec; return figures and curves."""
    torch.manual_seed(args.seed)
    model = load_model(args.folder, dtype=torch.float32)
    stock = model.num_parameters()
    set_positions(model, spec)
    added = model.num_parameters() - stock
    device = choose_device(args.device)
    model.to(device)
    training_text = hf_model.tokenize_text(args.train, args.folder)
    # The targets are all tokens of a text.
    rows = draw_rows(training_text.targets, args.length, args.seed)
    stream = hf_model.tokenize_text(args.valid, args.folder)
    size = args.length
    if not rows or stream.size < size:
        raise UserError(f"--length {size}: --train or --valid is shorter; choose fewer tokens")
    # With a stride of a whole block, every token of a block is predicted.
    blocks = [*spread_windows(stream.size, size, stride=size, longest=size, count=args.blocks)]

    def compute_loss(update: int) -> Tensor:
        ids = rows[update % len(rows)][None].to(device)
        with torch.autocast(device, torch.bfloat16, enabled=args.bf16):
            # With this mask, transformers 4 does not look for packed texts, and attention is fast.
            mask = torch.ones_like(ids)
            return model(input_ids=ids, attention_mask=mask, labels=ids, use_cache=False).loss

    def evaluate() -> Row:
        losses = {}
        for number, block in enumerate(blocks, start=1):
            inputs = stream.inputs[None, block.start : block.end].to(device)
            targets = stream.targets[None, block.start : block.end].to(device)
            losses[f"loss_{number}"] = -float(hf_model.predict(model, inputs, targets).mean())
        return losses

    training = Training(model, args.lr, folder)
    training.run(args.updates, args.every, compute_loss, evaluate)
    model.save_pretrained(folder / "model")
    AutoTokenizer.from_pretrained(args.folder).save_pretrained(folder / "model")
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
    baselines = {row["updates"]: _compute_perplexities(row) for row in first["evaluations"]}
    for spec, trained in outputs.items():
        for evaluation in trained["evaluations"]:
            if evaluation["updates"] not in baselines:  # where an earlier call of this model ended
                continue
            perplexities = _compute_perplexities(evaluation)
            change = compare(perplexities, baselines[evaluation["updates"]]).interval  # of logs
            curves.append(
                {"model": spec, **evaluation}
                | interval_of_perplexity(perplexities.values()).figures("perplexity")
                | {name: math.exp(bound) for name, bound in change.figures("ratio").items()}
            )
        last = {name: x for name, x in curves[-1].items() if not name.startswith("loss_")}
        costs = {name: trained[name] for name in ("new_parameters", "seconds_per_update")}
        encoding = {"position_encoding": trained["position_encoding"]}
        rows.append({"model": spec, **encoding, **last, **costs})
        losses += [
            {"model": spec, "update": update, "loss": loss}
            for update, loss in enumerate(trained["training_losses"], start=1)
        ]
    facts = {
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
    return Record("continued", figures, facts, seed=args.seed, command=own_command())


def draw(curves: Sequence[Row], path: Path) -> None:
    """Draw perplexity over updates, a line for each spec, as PNG."""
    lines = {
        spec: pictures.Line.over_seeds(  # of one seed
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


def _compute_perplexities(evaluation: Row) -> dict[int, float]:
    """Compute the perplexity of each block, by its number from 0."""
    losses = [value for name, value in evaluation.items() if name.startswith("loss_")]
    return {number: math.exp(loss) for number, loss in enumerate(losses)}


def _collect_inputs(args: argparse.Namespace, spec: str) -> Inputs:
    """Collect what a training depends on, without ``--updates``: more of them continue it."""
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
