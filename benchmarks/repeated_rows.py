"""Times encodings whose table rows serve many distances: in decoding, and beside transformers.

A step of decoding reads a new token through 12 layers of RoBERTa-base's width, which have cached
the keys of earlier tokens. The model of transformers, DebertaV2Model, has one layer of the same
sizes, in training with dropout. All take turns; a ratio is to ``none``.

    python benchmarks/repeated_rows.py --threads 1
"""

from __future__ import annotations

from measuring.process import restart_with_settings

if __name__ == "__main__":
    restart_with_settings()  # of the allocator and of logs, which torch reads when imported

import argparse
from copy import copy
from typing import Any

import torch
from transformers import DebertaV2Config, DebertaV2Model

from fairseq_posenc.api import Cache, SelfAttention, StackPositions
from measuring import timing
from measuring.commands import add_training_options, new_parser, run_script
from measuring.contenders import Contender
from measuring.families import ROBERTA_BASE, Case
from measuring.page import Rows
from measuring.scopes import SCOPES

ENCODINGS = ["shaw", "shaw(max_distance=16)", "m4m", "m4m(max_distance=16)", "deberta_v2", "t5"]
LAYERS = ["none", "deberta_v2", "shaw", "m4"]  # in training, beside DebertaV2Model


def parse_args(words: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = new_parser(__doc__)
    add_training_options(parser, ENCODINGS)
    add = parser.add_argument
    add("--cached", type=int, default=2048, help="cached tokens of a step (default: 2048)")
    add("--lengths", nargs="+", type=int, default=[512, 1024, 2048], help="n of layers in training")
    return parser.parse_args(words)


def build_step(spec: str, case: Case) -> timing.Pass:
    """Build a step of decoding after ``case.length`` cached tokens; it leaves the caches alone."""
    torch.manual_seed(1)
    cached = case.length
    positions = StackPositions(
        spec, ROBERTA_BASE.embed_dim, ROBERTA_BASE.num_heads, cached + 1, causal=True
    )
    layers = [SelfAttention(positions) for _ in range(ROBERTA_BASE.layers)]
    for module in (positions, *layers):
        module.eval().to(case.device, case.dtype)
    x = torch.randn(case.batch, cached + 1, ROBERTA_BASE.embed_dim).to(case.device, case.dtype)
    caches = [Cache() for _ in layers]
    with torch.no_grad():
        embedded, shared = positions(x[:, :cached])
        for layer, cache in zip(layers, caches):
            layer(embedded, shared, cache)

    @torch.no_grad()
    def run() -> None:
        token, shared = positions(x[:, cached:], past=cached)
        for layer, cache in zip(layers, caches):
            # A layer replaces what its cache keeps; a copy keeps the cache for the next step.
            token, _ = layer(token, shared, copy(cache))

    return run


def build_deberta_v2(case: Case) -> timing.Pass:
    """Build a training step of transformers' DebertaV2Model with one layer."""
    config = DebertaV2Config(
        hidden_size=ROBERTA_BASE.embed_dim,
        num_attention_heads=ROBERTA_BASE.num_heads,
        intermediate_size=ROBERTA_BASE.ffn_dim,
        num_hidden_layers=1,
        vocab_size=8,
        max_position_embeddings=max(case.length, 512),
        hidden_dropout_prob=case.dropout,
        attention_probs_dropout_prob=case.dropout,
        relative_attention=True,
        position_buckets=256,
        pos_att_type=["c2p", "p2c"],
        norm_rel_ebd="layer_norm",
        share_att_key=True,
        position_biased_input=False,
    )
    torch.manual_seed(1)
    model: Any = DebertaV2Model(config)
    x = torch.randn(case.batch, case.length, ROBERTA_BASE.embed_dim).to(case.device, case.dtype)
    x.requires_grad_()
    model.train().to(case.device, case.dtype)

    def run() -> None:
        model(inputs_embeds=x).last_hidden_state.sum().backward()

    return run


def measure(args: argparse.Namespace) -> Rows:
    """Measure steps of decoding, and layers together with transformers' DebertaV2Model."""
    decoding = Case.from_args(args, length=args.cached, family="causal_lm")
    specs = dict.fromkeys(["none", *decoding.encodings(args.encodings)])
    steps = {spec: build_step(spec, decoding) for spec in specs}
    rows = _time("a step of 12 layers", args.cached, steps, args)
    for length in args.lengths:
        case = Case.from_args(args, length=length)
        passes = {spec: SCOPES["layer"](Contender(spec, "blocked"), case) for spec in LAYERS}
        passes["DebertaV2Model"] = build_deberta_v2(case)
        rows += _time("a layer in training", length, passes, args)
    return rows


def _time(
    subject: str, length: int, passes: dict[str, timing.Pass], args: argparse.Namespace
) -> Rows:
    """Time passes that take turns; ratios are to the first one."""
    rounds = timing.interleaved(list(passes.values()), args.device, args.rounds, args.seconds)
    return [
        {
            "encoding": name,
            "pass": subject,
            "length": length,
            "seconds": timing.median(rounds, index),
            "ratio": timing.ratio(rounds, index, baseline=0),
        }
        for index, name in enumerate(passes)
    ]


if __name__ == "__main__":
    run_script("repeated_rows", parse_args, measure)
