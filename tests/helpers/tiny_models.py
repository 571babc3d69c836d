"""A tiny dictionary, and tiny models of the three families."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, get_args

import torch
from fairseq.data import Dictionary
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY, MODEL_DATACLASS_REGISTRY
from omegaconf import OmegaConf

from fairseq_posenc import registry, specs
from fairseq_posenc.encodings.base import ENCODINGS
from fairseq_posenc.identity import Identity, WeightSettings, is_identity
from fairseq_posenc.user_dir import register

register()

NAMES = registry.names()
COMPANIONS = sorted({*ENCODINGS} - {*NAMES})  # windows, temperatures and their like
WORDS = [f"w{index}" for index in range(20)]
ARCHITECTURES = {
    "masked_lm": "roberta_none_tiny",
    "causal_lm": "transformer_lm_none_tiny",
    "translation": "transformer_none_tiny",
}
STOCK = {"masked_lm": "roberta", "causal_lm": "transformer_lm", "translation": "transformer"}
_ENCODER = {"encoder_embed_dim": 32, "encoder_ffn_embed_dim": 48, "encoder_attention_heads": 4}
_DECODER = {"decoder_embed_dim": 32, "decoder_ffn_embed_dim": 48, "decoder_attention_heads": 4}
ARGS: dict[str, dict[str, Any]] = {
    "masked_lm": {
        "encoder_layers": 3,
        **_ENCODER,
        "max_positions": 24,
    },
    "causal_lm": {
        "decoder_layers": 2,
        **_DECODER,
        "decoder_input_dim": 32,
        "decoder_output_dim": 32,
        "max_target_positions": 24,
        "tokens_per_sample": 24,
        "decoder_normalize_before": True,
        "share_decoder_input_output_embed": True,
        "activation_fn": "gelu",
    },
    "translation": {
        "encoder_layers": 2,
        "decoder_layers": 2,
        **_ENCODER,
        **_DECODER,
        "max_source_positions": 24,
        "max_target_positions": 24,
    },
}
# Values worth a test, for every encoding that has such an option.
OPTION_VALUES = {
    "max_distance": ["3"],
    "per_head": ["true"],
    "scale_factor": ["3"],
    "reset": ["true"],
    "base": ["2"],
    "fraction": ["0.5"],
    "scaling": ["linear:4", "ntk:4", "yarn:4", "llama3:4:length=9"],
    "tie_projections": ["true"],
    "cross_attention": ["true"],
    "num_buckets": ["16"],
    "buckets": ["6"],
    "width": ["16"],
    "threshold": ["4"],
    "scale_base": ["20"],
    "scale": ["0.03"],
    "start": ["1"],
    "positions": ["4"],
    "rank": ["3"],
    "extent": ["3"],
    "axes": ["2"],
    "sections": ["1/3"],
}
COMPOSITIONS = [
    "learned+m4m",
    "rope+m4(reset=true)",
    "sinusoidal+rope",
    "sentence_learned+m4",
    "shaw+shaw_values",
    "tupe_shared(reset=true)",
    "m4m+alibi",
    "pope+fox",
]
# Layers that differ: some without positions, with tables of their own, with one shared by some.
PATTERNS = [
    "rope,none",
    "learned+m4m,t5",
    "t5,alibi+t5(num_buckets=16)",
    "m4(reset=true),rope(base=500)",
]
# One encoding of each kind of computation: vectors, angles, biases, tables, values, counts, gates.
REPRESENTATIVES = [
    *("none", "learned", "sinusoidal(layout=fairseq)", "sentence_learned+m4", "learned+m4m"),
    *("rope", "xpos", "pope+fox", "rope+m4(reset=true)", "alibi", "t5", "fire", "sandwich", "cope"),
    *("shaw+shaw_values", "deberta_v2", "m3", "m4m", "tupe_shared(reset=true)"),
    *("inkling(extent=3)", "lerope"),
    "t5,alibi+t5(num_buckets=16)",
]
NO_DROPOUT = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}


def needs_causal(spec: str) -> bool:
    """Return whether a spec has a meaning in decoders alone."""
    return "causal" in spec or specs.parse(spec).is_causal_only


def directions(spec: str) -> list[str]:
    """Name the directions of attention that an encoding has a formula for."""
    return ["lr"] if "cope" in spec else ["both", "lr", "rl"]


def encoding_specs(*places: str) -> list[str]:
    """Return every encoding, alone and with each of its options, that acts on given places."""
    found = []
    for name in registry.names():
        if registry.get(name).acts_on not in places:
            continue
        found.append(name)
        for option, parameter in registry.options(name).items():
            values = get_args(parameter.annotation) or OPTION_VALUES[option]
            if type(None) in values:  # Optional
                values = OPTION_VALUES[option]
            if option == "max_distance" and parameter.default is not None:
                values = ["20"]  # of buckets, which need some room
            found += [f"{name}({option}={value})" for value in values]
    return found


def make_dictionary(symbols: Iterable[str] = WORDS) -> Dictionary:
    dictionary = Dictionary()
    for symbol in symbols:
        dictionary.add_symbol(symbol)
    return dictionary


def make_model(family: str, arch: str | None = None, **options):
    """Build a tiny model of a family as fairseq's ``build_model`` does."""
    arch = arch or ARCHITECTURES[family]
    values = {**ARGS[family], **NO_DROPOUT, **options}
    names = ("source_dictionary", "target_dictionary", "dictionary")
    task = SimpleNamespace(**dict.fromkeys(names, make_dictionary()), max_positions=lambda: 24)
    cls = ARCH_MODEL_REGISTRY[arch]
    if arch in MODEL_DATACLASS_REGISTRY:
        config = MODEL_DATACLASS_REGISTRY[arch]()
        for key, value in {"add_bos_token": False, "tpu": False, **values}.items():
            setattr(config, key, value)
        args = OmegaConf.structured(config)
    else:
        args = Namespace(arch=arch, **values)
        ARCH_CONFIG_REGISTRY[arch](args)
    return cls.build_model(args, task).eval()


def of_the_last_version(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a state whose identities say their positions, and nothing more."""
    return {
        name: Identity.from_tensor(value)._replace(weight_settings=WeightSettings()).to_tensor()
        if is_identity(name)
        else value
        for name, value in state.items()
    }


def make_tokens(batch: int = 3, length: int = 9, padding: int = 0) -> torch.Tensor:
    """Return random sentences from <s> to </s>; the second ends in so much padding instead."""
    tokens = torch.randint(4, 24, (batch, length))
    tokens[:, 0] = 0
    tokens[:, -1] = 2
    tokens[1:2, length - padding :] = 1
    return tokens


def logits(model, family: str, tokens: torch.Tensor) -> torch.Tensor:
    """Return the model's output ``(batch, length, vocabulary)`` for a batch of tokens."""
    if family == "translation":
        return model(tokens, tokens.ne(1).sum(1), tokens)[0]
    return model(tokens)[0]


def assert_decoding_equals_full_pass(
    model, family: str, source: torch.Tensor, orders: Iterable[list[int]], tolerance: float = 1e-5
) -> dict:
    """Decode step by step, reordered after each as a beam search does; return the last state.

    ``source`` has a sentence for each beam, ``orders`` for each step the beams that go on.
    """
    encoder_out = None
    if family == "translation":
        encoder_out = model.encoder(source, source.ne(1).sum(1))
    prefix = torch.full((len(source), 1), 2)  # fairseq's decoders begin with </s>
    state: dict = {}
    for order in orders:
        step = model.decoder(prefix, encoder_out=encoder_out, incremental_state=state)[0]
        full = model.decoder(prefix, encoder_out=encoder_out)[0]
        torch.testing.assert_close(step[:, -1], full[:, -1], rtol=tolerance, atol=tolerance)
        model.decoder.reorder_incremental_state_scripting(state, torch.tensor(order))
        prefix = torch.cat([prefix[order], torch.randint(4, 24, (len(source), 1))], 1)
    return state
