"""Pass keys hidden in a real text: does a causal LM find them, by depth and length?

    python benchmarks/needle.py own=FOLDER 'yarn=FOLDER@own(scaling=yarn:2)' --text book.txt \
        --lengths 2048,4096 --out needle.json

Each text hides the pass keys of five cities, five digits each, at five depths. A model reads it
once and is asked for each key; the others are distractors. An answer is right if greedy decoding
gives the whole key. All models read the same texts. Shorter texts have the same keys and are the
ends of longer ones, unless a longer one starts at the beginning of FILE. The same command continues
after a stop, and more lengths or texts can follow.
"""

from __future__ import annotations

import argparse
import copy
import functools
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoTokenizer, DynamicCache

from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.experiments.length import hf_model
from fairseq_posenc.workbench.experiments.length.model import (
    FORM,
    LoadedModel,
    NamedModel,
    parse_models,
)
from fairseq_posenc.workbench.experiments.probe.picture import draw_depth_maps
from fairseq_posenc.workbench.results import pictures
from fairseq_posenc.workbench.results.differences import Scale, compare
from fairseq_posenc.workbench.results.intervals import interval, interval_of_share
from fairseq_posenc.workbench.results.record import Record, Row
from fairseq_posenc.workbench.running import options
from fairseq_posenc.workbench.running.devices import ComputeOptions, choose_dtype
from fairseq_posenc.workbench.running.files import checksum
from fairseq_posenc.workbench.running.folders import lock_folder
from fairseq_posenc.workbench.running.jobs import Inputs, Outputs, RunContext, Step
from fairseq_posenc.workbench.running.progress import format_time, say
from measuring.commands import existing_file, exit_on_error, new_parser, own_command
from measuring.trained_models import CACHE, checksum_weights, versions

DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
CITIES = ("Oslo", "Cairo", "Lima", "Tokyo", "Rome", "Delhi", "Paris", "Boston", "Sydney", "Berlin")
NEEDLE = (
    "\n\nThe secret pass key of {city} is {key}. Remember it: {key} is the pass key of {city}.\n\n"
)
QUESTION = "\n\nWhat is the secret pass key of {city}? The secret pass key of {city} is"
MAX_QUESTION = 128  # tokens that are kept free for a question and its answer
SHARE = Scale("share of right answers", higher_is_better=True)


class Needles(NamedTuple):
    """A text with its pass keys, in tokens."""

    text: Tensor  # `(1, T)`
    questions: Sequence[Tensor]  # for each key, `(1, Q)`
    answers: Sequence[Tensor]  # the keys, `(1, A)`


def parse_args(words: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = new_parser(__doc__)
    add = parser.add_argument
    named = "folders of transformers; @SPEC gives a model other positions"
    add("models", nargs="+", metavar=FORM.partition(" ")[0] + "[@SPEC]", help=named)
    text = "the text that hides the keys, in UTF-8"
    add("--text", type=existing_file, required=True, metavar="FILE", help=text)
    options.add_lengths(parser, "tokens of a text", "2048,4096,8192")
    add("--texts", type=int, default=10, help="texts of each length (default: 10)")
    options.add_computing(parser)
    add("--out", type=Path, required=True, metavar="FILE", help="the record; answers lie beside it")
    return parser.parse_args(words)


def hide(tokens: Tensor, tokenizer: Any, length: int, number: int, texts: int) -> Needles:
    """Hide pass keys in a piece of a text.

    Args:
        tokens: the whole text, ``(N,)``.
        tokenizer: tokenizer of the model.
        length: tokens of the piece, with its keys.
        number: number of the piece, from 0; the part of the text and the keys depend on it.
        texts: number of pieces, which are spread over the whole text.
    """

    def encode(text: str) -> Tensor:
        return torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])

    generator = random.Random(number)
    cities = generator.sample(CITIES, len(DEPTHS))
    keys = [str(generator.randrange(10_000, 100_000)) for _ in DEPTHS]
    needles = [encode(NEEDLE.format(city=city, key=key)) for city, key in zip(cities, keys)]
    room = length - sum(map(len, needles))
    if not 0 < room <= len(tokens):
        keys_size = length - room
        raise UserError(
            f"--lengths {length}: choose a length above {keys_size}, the tokens of the keys, and "
            f"up to {keys_size + len(tokens):,}, which all of --text fills"
        )
    end = max(len(tokens) * (number + 1) // texts, room)  # of the piece
    piece = tokens[end - room : end]
    parts = []
    begin = 0
    for depth, needle in zip(DEPTHS, needles):
        place = round(room * depth)
        parts += [piece[begin:place], needle]
        begin = place
    parts.append(piece[begin:])
    return Needles(
        torch.cat(parts)[None],
        [encode(QUESTION.format(city=city))[None] for city in cities],
        [encode(f" {key}")[None] for key in keys],
    )


@torch.no_grad()
def ask(loaded: LoadedModel, needles: Needles) -> Outputs:
    """Read a text once and ask for each key.

    Returns:
        By depth, whether greedy decoding gives the key, 0 or 1, and the natural logarithm of its
        probability.
    """
    model: Any = loaded.model
    device = next(loaded.model.parameters()).device
    cache = DynamicCache(config=model.config)
    model(needles.text.to(device), use_cache=True, logits_to_keep=1, **{CACHE: cache})
    right: list[int] = []
    log_probability: list[float] = []
    for question, answer in zip(needles.questions, needles.answers):
        tokens = torch.cat([question, answer[:, :-1]], 1).to(device)
        output = model(
            tokens,
            use_cache=True,
            logits_to_keep=answer.size(1),
            **{CACHE: copy.deepcopy(cache)},  # a model appends to the cache that it is given
        )
        logits = output.logits.float().cpu()  # [1, A, V]
        # Greedy decoding gives the key if, after each part of it, its next token is likeliest.
        right.append(int(torch.equal(logits.argmax(-1), answer)))
        log_probability.append(float(logits.log_softmax(-1).gather(-1, answer[..., None]).sum()))
    return {"right": right, "log_probability": log_probability}


def measure(args: argparse.Namespace) -> Iterator[list[Row]]:
    """Ask all models for the keys of all texts; yield the answers of each length.

    Raises:
        UserError: a model is not a folder of transformers, or lengths are wrong.
    """
    checkpoints = parse_models(args.models)
    for checkpoint in checkpoints:
        if not checkpoint.is_folder:
            raise UserError(f"{checkpoint.name}: {checkpoint.path} is not a folder of transformers")
    computing = ComputeOptions.choose(args.device, args.fp16, args.bf16)
    # A model is loaded only if an answer is missing, and once.
    longest = max(args.lengths) + MAX_QUESTION
    load = functools.cache(partial(hf_model.load, computing=computing, longest=longest))
    for length in args.lengths:
        rows: list[Row] = []
        for number, checkpoint in product(range(args.texts), checkpoints):
            outputs = _ask_once(load, checkpoint, args, length, number)
            rows += [
                {
                    "model": checkpoint.name,
                    "override": checkpoint.spec_override,
                    "length": length,
                    "text": number + 1,
                    "depth": depth,
                    "right": right,
                    "log_probability": log_probability,
                }
                for depth, right, log_probability in zip(
                    DEPTHS, outputs["right"], outputs["log_probability"]
                )
            ]
        yield rows


def _ask_once(
    load: Callable[[NamedModel], LoadedModel],
    checkpoint: NamedModel,
    args: argparse.Namespace,
    length: int,
    number: int,
) -> Outputs:
    """Ask a model for the keys of a text, unless its folder beside the record has the answers."""

    def work(_: RunContext) -> Outputs:
        tokens, tokenizer = _tokenize(args.text, checkpoint.path)
        began = time.monotonic()
        outputs = ask(load(checkpoint), hide(tokens, tokenizer, length, number, args.texts))
        took = format_time(time.monotonic() - began)
        count = f"{sum(outputs['right'])} of {len(DEPTHS)} keys"
        say(f"{checkpoint.name}, {length:,} tokens, text {number + 1}: {count} ({took})")
        return outputs

    folder = args.out.with_suffix("") / checkpoint.name / f"{length}-{number}"
    return Step(folder, _collect_inputs(checkpoint, args, length, number), work).do()


@functools.cache
def _tokenize(text: Path, folder: Path) -> tuple[Tensor, Any]:
    """Read a text's tokens, ``(N,)``, and the tokenizer of a model."""
    stream = hf_model.tokenize_text(text, folder)
    return stream.targets, AutoTokenizer.from_pretrained(folder)  # targets are all tokens


def summarise(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """Summarise by model and length, with intervals over the texts, and count by depth as well."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    by_length: list[Row] = []
    for length in dict.fromkeys(row["length"] for row in rows):
        values = {model: _average_texts(rows, model, length, "right") for model in models}
        for model in models:
            share = interval_of_share(values[model].values())
            log_probability = _average_texts(rows, model, length, "log_probability")
            change = compare(values[model], values[models[0]], SHARE)
            by_length.append(
                {"model": model, "length": length, "texts": len(values[model])}
                | share.figures("share")
                | interval(log_probability.values()).figures("log_probability")
                | change.interval.figures("change")
            )
    by_cell: dict[tuple[Any, ...], list[Any]] = {}  # (model, length, depth) -> 0 or 1 of each text
    for row in rows:
        by_cell.setdefault((row["model"], row["length"], row["depth"]), []).append(row["right"])
    by_depth: list[Row] = [
        {"model": model, "length": length, "depth": depth, "right": sum(right), "of": len(right)}
        for (model, length, depth), right in by_cell.items()
    ]
    return by_length, by_depth


def draw(by_depth: Sequence[Row], path: Path) -> None:
    """Draw a map of depth and length for each model, of shares of right answers, as PNG."""
    models = list(dict.fromkeys(row["model"] for row in by_depth))
    lengths = list(dict.fromkeys(row["length"] for row in by_depth))
    share = {
        (row["model"], row["length"], row["depth"]): row["right"] / row["of"] for row in by_depth
    }
    maps = {
        model: [[share[model, length, depth] for length in lengths] for depth in DEPTHS]
        for model in models
    }
    figure = draw_depth_maps(maps, lengths, DEPTHS)
    figure.supxlabel("length of the text, in tokens", color=pictures.GREY)
    figure.supylabel("depth of the key", color=pictures.GREY)
    pictures.save(figure, path)


def _average_texts(rows: Sequence[Row], model: str, length: int, column: str) -> dict[int, float]:
    """Average a column over the keys of each text."""
    by_text: dict[int, list[float]] = {}
    for row in rows:
        if (row["model"], row["length"]) == (model, length):
            by_text.setdefault(row["text"], []).append(row[column])
    return {text: fmean(values) for text, values in by_text.items()}


def _collect_inputs(
    checkpoint: NamedModel, args: argparse.Namespace, length: int, number: int
) -> Inputs:
    return {
        "weights": checksum_weights(checkpoint.path),
        "override": checkpoint.spec_override,
        "text": checksum(args.text),
        "sizes": [length, number, args.texts],
        "precision": _name_precision(args),
        "prompts": [NEEDLE, QUESTION, CITIES, DEPTHS],
    }


def _name_precision(args: argparse.Namespace) -> str:
    return str(choose_dtype(args.fp16, args.bf16)).removeprefix("torch.")


def main() -> None:
    """Ask, write the record after each length, and draw it."""
    args = parse_args(sys.argv[1:])
    facts = {"text": str(args.text), **versions(), "precision": _name_precision(args)}
    rows: list[Row] = []
    with lock_folder(args.out.with_suffix("")):
        for answers in measure(args):
            rows += answers
            by_length, by_depth = summarise(rows)
            figures = {"lengths": by_length, "depths": by_depth, "answers": rows}
            Record("needle", figures, facts, command=own_command()).write(args.out)
    if pictures.can_draw():
        draw(by_depth, args.out.with_suffix(".png"))
    for row in by_length:
        shown = f"{row['share']:.2f}  {row['log_probability']:.2f}"
        say(f"{row['model']:<12} {row['length']:>7,}  {shown}")


if __name__ == "__main__":
    exit_on_error(main)
