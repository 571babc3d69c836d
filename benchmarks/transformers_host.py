"""Measures the time of a model of transformers with our positions and without them.

The model has the sizes of SmolLM2-135M and random weights. It makes a step of decoding with cached
tokens, and a step of training: on one thread in processor time, or on a GPU in wall time. The
models take turns; the medians of their ratios to the stock model in the same turn are printed:

    python benchmarks/transformers_host.py --out host.json
    python benchmarks/transformers_host.py --device cuda --dtype bfloat16 --out host_gpu.json
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from fairseq_posenc.folders import json_values
from fairseq_posenc.hf import set_positions
from measuring import timing
from measuring.commands import exit_on_error, new_parser

SPECS = ["own", "3*own,none", "alibi", "own+alibi", "t5", "m4m"]


def build(layers: int) -> LlamaForCausalLM:
    """Build a model of the sizes of SmolLM2-135M with random weights."""
    torch.manual_seed(1)
    sizes = {"hidden_size": 576, "intermediate_size": 1536, "num_key_value_heads": 3}
    config = LlamaConfig(
        **sizes, num_attention_heads=9, num_hidden_layers=layers, vocab_size=49152,
        max_position_embeddings=8192, rope_theta=100000.0, tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def prepare_decoding(model: LlamaForCausalLM, length: int) -> timing.Pass:
    """Fill a cache; return a step that decodes a token, and crops the cache again."""
    model.eval()
    ids = torch.arange(length, device=model.device)[None] % 1000
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, past_key_values=cache)

    def step() -> None:
        with torch.no_grad():
            model(ids[:, :1], past_key_values=cache)
        cache.crop(-1)  # remove the new token

    return step


def prepare_training(model: LlamaForCausalLM, length: int, batch: int) -> timing.Pass:
    """Return a step of training without an optimizer."""
    model.train()
    ids = torch.arange(batch * length, device=model.device).view(batch, length) % 1000

    def step() -> None:
        model.zero_grad()
        model(ids, labels=ids, use_cache=False).loss.backward()

    return step


def measure(steps: dict[str, timing.Pass], device: str, turns: int) -> dict[str, float]:
    """Measure the time of each step in turns; return medians of ratios to the first."""
    rounds = timing.interleaved(list(steps.values()), torch.device(device), turns)
    ratios = {name: timing.ratio(rounds, index, 0) for index, name in enumerate(steps)}
    return json_values({"seconds of stock": timing.median(rounds, 0), **ratios})


def main() -> None:
    """Measure, print, and write the record."""
    parser = new_parser(__doc__)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--cached", type=int, default=1024, help="tokens in the cache")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a row in training")
    parser.add_argument("--batch", type=int, default=4, help="rows in training")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--training-turns", type=int, default=3)
    parser.add_argument("--specs", nargs="*", default=SPECS)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    stock = build(args.layers).to(device=args.device, dtype=getattr(torch, args.dtype))
    models = {"stock": stock} | {x: set_positions(copy.deepcopy(stock), x) for x in args.specs}
    decoding = {name: prepare_decoding(model, args.cached) for name, model in models.items()}
    record: dict[str, Any] = {"transformers": transformers.__version__}
    if args.device == "cuda":
        record |= {"gpu": torch.cuda.get_device_name(), "dtype": args.dtype}
    record["decoding"] = measure(decoding, args.device, args.turns)
    print(json.dumps(record, indent=1), flush=True)
    if args.training_turns:
        training = {
            name: prepare_training(model, args.length, args.batch) for name, model in models.items()
        }
        record["training"] = measure(training, args.device, args.training_turns)
        print(json.dumps(record["training"], indent=1))
    if args.out is not None:
        args.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    exit_on_error(main)
