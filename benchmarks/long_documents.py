"""Reads documents longer than a sentence encoder's table of positions: does a longer table help?

    python benchmarks/long_documents.py FOLDER --text book.txt --length 1024 --out long.json

A text is cut into documents, and a passage is taken from the first half and from the second half
of each. The figure is the share of passages whose document is the nearest of all (recall at 1).
The model reads documents cut off at its own length, and whole ones with a table that is extended
by ``copy`` or ``interpolate``. Nothing is trained. Encoders need transformers 5.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModel, AutoTokenizer, PreTrainedModel

from fairseq_posenc.errors import UserError
from fairseq_posenc.hf import set_positions
from fairseq_posenc.hf.own_positions import count_positions
from fairseq_posenc.position_parameters import LengthRule
from fairseq_posenc.workbench.results.differences import Scale, compare
from fairseq_posenc.workbench.results.intervals import interval_of_share
from fairseq_posenc.workbench.results.record import Record, Row
from fairseq_posenc.workbench.running import options
from fairseq_posenc.workbench.running.progress import say
from measuring.commands import existing_file, exit_on_error, new_parser, own_command
from measuring.trained_models import versions

BATCH = 8  # documents
ENCLOSING = 2  # tokens that `encode` puts around a text
PASSAGE = 64  # tokens
PLACES = {"first_half": 0.25, "second_half": 0.75}  # where passages begin, as a part of a document
SHARE = Scale("recall at 1", higher_is_better=True)


def parse_args(words: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("folder", type=Path, help="an encoder of transformers, with its tokenizer")
    add("--text", type=existing_file, required=True, metavar="FILE", help="a text in UTF-8")
    options.add_count(parser, "--length", "tokens of a document", 1024)
    options.add_count(parser, "--documents", "spread over the text", 300)
    add("--out", type=Path, required=True, metavar="FILE", help="the record")
    return parser.parse_args(words)


def cut_documents(tokens: Tensor, length: int, count: int) -> Tensor:
    """Cut documents, ``(N, length)``, that are spread over a text and do not overlap.

    Raises:
        UserError: the text is too short.
    """
    if len(tokens) < length * count:
        raise UserError(
            f"--text has {len(tokens):,} tokens, and {count} documents of {length} have "
            f"{length * count:,}: take fewer --documents"
        )
    starts = torch.arange(count) * (len(tokens) - length) // max(1, count - 1)
    return tokens[starts[:, None] + torch.arange(length)]


@torch.no_grad()
def encode(model: PreTrainedModel, tokenizer: Any, texts: Tensor) -> Tensor:
    """Compute a vector of length 1 for each of N texts ``(N, T)``: the mean over its tokens."""
    first = texts.new_full((len(texts), 1), tokenizer.cls_token_id)
    last = texts.new_full((len(texts), 1), tokenizer.sep_token_id)
    inputs = torch.cat([first, texts, last], 1)
    means = [model(input_ids=rows).last_hidden_state.mean(1) for rows in inputs.split(BATCH)]
    return F.normalize(torch.cat(means))


def measure(model: PreTrainedModel, tokenizer: Any, documents: Tensor) -> dict[str, list[float]]:
    """Measure for each document whether its passages find it, 1 or 0, by their half."""
    length = documents.size(1)
    room = min(length, count_positions(model) - ENCLOSING)
    vectors = encode(model, tokenizer, documents[:, :room])
    hits = {}
    for half, place in PLACES.items():
        begin = round(length * place)
        passages = encode(model, tokenizer, documents[:, begin : begin + PASSAGE])
        nearest = (passages @ vectors.T).argmax(1)
        hits[half] = nearest.eq(torch.arange(len(nearest))).double().tolist()
    return hits


def build_record(args: argparse.Namespace, hits: dict[str, dict[str, list[float]]]) -> Record:
    """Collect shares with intervals over documents, and differences to the cut-off documents."""
    rows: list[Row] = []
    cut_off = next(iter(hits.values()))
    for name, halves in hits.items():
        figures: dict[str, float] = {}
        for half, values in halves.items():
            figures |= interval_of_share(values).figures(half)
            change = compare(dict(enumerate(values)), dict(enumerate(cut_off[half])), SHARE)
            figures |= change.interval.figures(f"{half}_difference")
        rows.append({"model": name, **figures})
    facts = {
        "model": str(args.folder),
        "text": str(args.text),
        "documents": args.documents,
        "tokens_of_a_document": args.length,
        "tokens_of_a_passage": PASSAGE,
        **versions(),
    }
    return Record("long_documents", {"models": rows}, facts, command=own_command())


def main() -> None:
    """Measure the model as it is, and with each rule for a longer table."""
    args = parse_args(sys.argv[1:])
    tokenizer = AutoTokenizer.from_pretrained(args.folder)
    text = args.text.read_text(encoding="utf-8")
    tokens = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"][0]
    documents = cut_documents(tokens, args.length, args.documents)
    hits: dict[str, dict[str, list[float]]] = {}  # model -> half -> 1 or 0 of each document
    rules: list[LengthRule | None] = [None, "copy", "interpolate"]
    for rule in rules:
        model = AutoModel.from_pretrained(args.folder).eval()
        if rule is not None:
            set_positions(model, "own", args.length + ENCLOSING, extend=rule)
        name = "cut off" if rule is None else rule
        hits[name] = measure(model, tokenizer, documents)
        shares = ", ".join(f"{half} {fmean(found):.3f}" for half, found in hits[name].items())
        say(f"{name}: {shares}")
    build_record(args, hits).write(args.out)


if __name__ == "__main__":
    exit_on_error(main)
