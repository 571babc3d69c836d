"""Checks that trained models stay the same when they get their own positions as a spec.

    python benchmarks/same_model.py --decoder FOLDER --encoder FOLDER --sts dev.tsv

The script compares, before and after ``set_positions``, a decoder's logits and greedy generation,
and an encoder's vectors of sentences and Spearman's correlation of their cosines with the scores of
STS-B.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers
from sentence_encoder import Encoder, read_table, spearman
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from fairseq_posenc.hf import read_positions, set_positions
from measuring.commands import existing_file, exit_on_error, new_parser

TEXTS = [
    "The theory of relativity says that",
    "A language model is trained on text, one token at a time, and so",
    "Once upon a time, in a village at the foot of the mountains, there lived",
]


def distance(after: Tensor, before: Tensor) -> float:
    """Compute the largest difference, relative to the largest magnitude of ``before``."""
    return float((after - before).abs().max() / before.abs().max())


@torch.no_grad()
def compare_decoder(folder: Path, tokens: int) -> dict[str, object]:
    """Compare logits and greedy generation."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [tokenizer(text, return_tensors="pt") for text in TEXTS]
    settings = {"max_new_tokens": tokens, "do_sample": False}

    def run(model: PreTrainedModel) -> list[tuple[Tensor, Tensor]]:
        return [(model(**text).logits, model.generate(**text, **settings)) for text in texts]

    before = run(model)
    positions = read_positions(model)
    after = run(set_positions(model, positions))
    (old_logits, old_tokens), (new_logits, new_tokens) = zip(*before), zip(*after)
    return {
        "positions": positions,
        "largest difference of logits": max(map(distance, new_logits, old_logits)),
        "texts generated alike": sum(map(torch.equal, new_tokens, old_tokens)),
        "texts": len(TEXTS),
    }


def compare_encoder(folder: Path, sts: Path) -> dict[str, object]:
    """Compare vectors of sentences, and their correlation with people's scores."""
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    pairs = list(read_table(sts))
    scores = torch.tensor([float(row["score"]) for row in pairs])

    def run(model: PreTrainedModel) -> tuple[Tensor, float]:
        first, second = (
            Encoder(model, tokenizer).encode([row[key] for row in pairs])
            for key in ("sentence1", "sentence2")
        )
        return first, spearman((first * second).sum(1), scores)

    before, correlation_before = run(model)
    positions = read_positions(model)
    after, correlation_after = run(set_positions(model, positions))
    return {
        "positions": positions,
        "largest difference of vectors": distance(after, before),
        "spearman before": correlation_before,
        "spearman after": correlation_after,
        "pairs": len(pairs),
    }


def main() -> None:
    """Compare, and print a record."""
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("--decoder", type=Path, metavar="FOLDER", help="a causal language model")
    add("--tokens", type=int, default=48, help="tokens to generate (default: %(default)s)")
    add("--encoder", type=Path, metavar="FOLDER", help="an encoder of sentences")
    add("--sts", type=existing_file, metavar="FILE", help="STS-B's dev.tsv, with --encoder")
    args = parser.parse_args()
    if args.encoder and not args.sts:
        parser.error("--encoder needs --sts")
    record: dict[str, object] = {"transformers": transformers.__version__}
    if args.decoder:
        record["decoder"] = compare_decoder(args.decoder, args.tokens)
    if args.encoder:
        record["encoder"] = compare_encoder(args.encoder, args.sts)
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    exit_on_error(main)
