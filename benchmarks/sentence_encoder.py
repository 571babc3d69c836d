"""Gives a sentence encoder other positions, and trains it to reproduce its earlier vectors.

    python benchmarks/sentence_encoder.py FOLDER --specs own none alibi --sts dev.tsv \
        --qnli dev.tsv --distil train.tsv --updates 100 --out encoder.json

Two figures are measured before and during training: Spearman's correlation of cosines with the
scores of STS-B, and the share of QNLI's questions whose answer is the nearest of all sentences
(recall at 1). In training, the model with new positions learns the vectors that the folder's model
gives the sentences of STS-B's training set; no labels are read. The same command continues after a
stop, and with more --updates it continues finished trainings. Encoders need transformers 5.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from scipy import stats
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModel, AutoTokenizer, PreTrainedModel

from fairseq_posenc.hf import read_positions, set_positions
from fairseq_posenc.workbench.results.intervals import LEVEL, interval_of_share
from fairseq_posenc.workbench.results.record import Record, Row
from fairseq_posenc.workbench.running import options
from fairseq_posenc.workbench.running.files import checksum
from fairseq_posenc.workbench.running.jobs import Inputs, Outputs
from measuring.commands import existing_file, exit_on_error, new_parser, own_command
from measuring.trained_models import Training, checksum_weights, train_all, versions

BATCH = 64  # sentences
RESAMPLES = 1000  # of the pairs of STS-B, for the interval of the correlation


class Sentences(NamedTuple):
    """The sentences of the two measurements."""

    first: Sequence[str]  # of STS-B's pairs
    second: Sequence[str]
    scores: Sequence[float]  # how similar people find them
    questions: Sequence[str]  # of QNLI
    answers: Sequence[str]  # the sentence that answers each question


class Encoder(NamedTuple):
    """A model and its tokenizer, which compute the vector of a sentence."""

    model: PreTrainedModel
    tokenizer: Any

    def __call__(self, sentences: Sequence[str]) -> Tensor:
        """Compute vectors of length 1, ``(B, D)``: means over tokens."""
        inputs = self.tokenizer([*sentences], padding=True, truncation=True, return_tensors="pt")
        hidden = self.model(**inputs).last_hidden_state  # [B, T, D]
        kept = inputs["attention_mask"][..., None]
        return F.normalize((hidden * kept).sum(1) / kept.sum(1))

    @torch.no_grad()
    def encode(self, sentences: Sequence[str]) -> Tensor:
        """Compute the vectors of many sentences, ``(N, D)``, in batches of similar lengths."""
        order = sorted(range(len(sentences)), key=lambda index: len(sentences[index]))
        batches = [order[first : first + BATCH] for first in range(0, len(order), BATCH)]
        vectors = torch.cat([self([sentences[index] for index in batch]) for batch in batches])
        return vectors[torch.tensor(order).argsort()]


def parse_args(words: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("folder", type=Path, help="an encoder of transformers, with its tokenizer")
    add("--specs", nargs="+", required=True, metavar="SPEC", help="such as own or none")
    add("--sts", type=existing_file, required=True, metavar="FILE", help="STS-B's dev.tsv")
    add("--qnli", type=existing_file, required=True, metavar="FILE", help="QNLI's dev.tsv, or .gz")
    add("--distil", type=existing_file, required=True, metavar="FILE", help="STS-B's train.tsv")
    options.add_count(parser, "--questions", "number of QNLI's questions", 1000)
    updates_help = f"each on {BATCH} sentences; 0 only measures (default: %(default)s)"
    add("--updates", type=int, default=100, help=updates_help)
    options.add_count(parser, "--every", "updates between two evaluations", 50)
    add("--lr", type=float, default=5e-4, help="learning rate (default: %(default)s)")
    add("--seed", type=int, default=1, help="for the order and new parameters (default: 1)")
    add("--out", type=Path, required=True, metavar="FILE", help="the record; models lie beside it")
    return parser.parse_args(words)


def read_table(path: Path) -> Iterator[dict[str, str]]:
    """Read the rows of one of GLUE's files, values by column."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as file:
        # GLUE's quotation marks are part of its sentences.
        yield from csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)


def read_sentences(args: argparse.Namespace) -> Sentences:
    """Read pairs of STS-B, and questions of QNLI with different answers."""
    pairs = [*read_table(args.sts)]
    answered: dict[str, str] = {}  # answer -> question
    for row in read_table(args.qnli):
        if row["label"] == "entailment" and len(answered) < args.questions:
            answered.setdefault(row["sentence"], row["question"])
    return Sentences(
        [row["sentence1"] for row in pairs],
        [row["sentence2"] for row in pairs],
        [float(row["score"]) for row in pairs],
        [*answered.values()],
        [*answered],
    )


def measure(encoder: Encoder, sentences: Sentences) -> Row:
    """Measure an encoder; the interval of its correlation comes from resampled pairs."""
    cosines = (encoder.encode(sentences.first) * encoder.encode(sentences.second)).sum(1)
    scores = torch.tensor(sentences.scores)
    nearest = (encoder.encode(sentences.questions) @ encoder.encode(sentences.answers).T).argmax(1)
    right = (nearest == torch.arange(len(nearest))).double()
    resampled = [spearman(cosines[pairs], scores[pairs]) for pairs in draw_resamples(len(scores))]
    ends = torch.tensor([(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    low, high = torch.tensor(resampled).quantile(ends).tolist()
    return {
        "spearman": spearman(cosines, scores),
        "spearman_low": low,
        "spearman_high": high,
        **interval_of_share(right.tolist()).figures("recall"),
    }


def spearman(cosines: Tensor, scores: Tensor) -> float:
    """Compute Spearman's rank correlation."""
    return float(stats.spearmanr(cosines, scores).statistic)


def draw_resamples(count: int) -> Iterator[Tensor]:
    """Draw indices of pairs with replacement, the same ones for every model."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(RESAMPLES):
        yield torch.randint(count, (count,), generator=generator)


def distil(args: argparse.Namespace, spec: str, folder: Path) -> Outputs:
    """Give the encoder other positions, and train it to reproduce its earlier vectors.

    The folder keeps the state of the training, which continues after a stop.
    """
    torch.manual_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(args.folder)
    teacher = Encoder(AutoModel.from_pretrained(args.folder).eval(), tokenizer)
    model = AutoModel.from_pretrained(args.folder)
    student = Encoder(set_positions(model, spec), tokenizer)
    rows = [*read_table(args.distil)]
    texts = [*dict.fromkeys(row[name] for row in rows for name in ("sentence1", "sentence2"))]
    random.Random(args.seed).shuffle(texts)
    sentences = read_sentences(args)

    def compute_loss(update: int) -> Tensor:
        begin = update * BATCH % len(texts)
        batch = texts[begin : begin + BATCH]
        targets = teacher.encode(batch)
        return 1 - (student(batch) * targets).sum(1).mean()

    training = Training(model, args.lr, folder)  # has dropout in its updates only
    training.run(args.updates, args.every, compute_loss, lambda: measure(student, sentences))
    return {
        "position_encoding": read_positions(model),
        "seconds_per_update": training.seconds / max(1, training.updates),
        "evaluations": training.evaluations,
    }


def build_record(args: argparse.Namespace, outputs: Mapping[str, Outputs]) -> Record:
    """Collect ``curves``, all evaluations, and ``models``, those after the last update."""
    curves = [
        {"model": spec, "position_encoding": figures["position_encoding"], **row}
        for spec, figures in outputs.items()
        for row in figures["evaluations"]
    ]
    last: dict[str, Row] = {row["model"]: row for row in curves}  # later rows replace earlier ones
    rows = [
        {**row, "seconds_per_update": outputs[spec]["seconds_per_update"]}
        for spec, row in last.items()
    ]
    facts = {
        "model": str(args.folder),
        "sts": str(args.sts),
        "qnli": str(args.qnli),
        "distil": str(args.distil),
        "sentences_per_update": BATCH,
        "lr": args.lr,
        **versions(),
    }
    figures = {"models": rows, "curves": curves}
    return Record("encoder", figures, facts, seed=args.seed, command=own_command())


def collect_inputs(args: argparse.Namespace, spec: str) -> Inputs:
    """Collect what a training depends on, without ``--updates``: more of them continue it."""
    files = [checksum(path) for path in (args.sts, args.qnli, args.distil)]
    names = ("questions", "every", "lr", "seed")
    return {
        "files": [*checksum_weights(args.folder), *files],
        "spec": spec,
        **{name: getattr(args, name) for name in names},
    }


def main() -> None:
    """Measure and train with each spec."""
    train_all(parse_args(sys.argv[1:]), distil, collect_inputs, build_record)


if __name__ == "__main__":
    exit_on_error(main)
