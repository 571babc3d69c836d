"""How the layers of model classes of transformers are, where they can be as fairseq's are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Style(NamedTuple):
    """How the layers of a family of model classes are.

    Attributes:
        stack: ``encoder_stack`` or ``decoder_stack``.
        sizes: fields of a ``StackConfig``, and what they are called there.
        fields: those that must have a value.
        config: settings that make it what fairseq's Transformer is.
    """

    stack: str
    sizes: Mapping[str, str]
    fields: Mapping[str, Any]
    config: Mapping[str, Any]


EPSILON = 1e-5  # of fairseq's layer norms
_COMMON = {
    "vocab_size": "vocab_size",
    "embed_dim": "hidden_size",
    "num_heads": "num_attention_heads",
    "num_layers": "num_hidden_layers",
}
BERT = Style(
    "encoder_stack",
    {
        **_COMMON,
        "ffn_dim": "intermediate_size",
        "activation": "hidden_act",
        "dropout": "hidden_dropout_prob",
        "attention_dropout": "attention_probs_dropout_prob",
    },
    {
        "embedding_norm": True,
        "norm_before": False,
        "final_norm": False,
        "embed_scale": 1.0,
        "activation_dropout": 0.0,
    },
    {"layer_norm_eps": EPSILON},
)
OPT = Style(
    "decoder_stack",
    {
        **_COMMON,
        "ffn_dim": "ffn_dim",
        "activation": "activation_function",
        "dropout": "dropout",
        "attention_dropout": "attention_dropout",
    },
    {"embedding_norm": False, "norm_before": True, "final_norm": True, "activation_dropout": 0.0},
    {"do_layer_norm_before": True, "tie_word_embeddings": False},
)

GPT_NEOX = Style(
    "decoder_stack",
    {
        **_COMMON,
        "ffn_dim": "intermediate_size",
        "activation": "hidden_act",
        "dropout": "hidden_dropout",
        "attention_dropout": "attention_dropout",
    },
    OPT.fields,
    {
        "layer_norm_eps": EPSILON,
        "use_parallel_residual": False,
        "tie_word_embeddings": False,
    },
)
