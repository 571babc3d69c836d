"""What modules of Hugging Face's transformers compute, by case: an encoding and its options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

Tensors = dict[str, Tensor]
# A module that holds the weights, and the function that is compared, of the case's inputs.
Theirs = tuple[nn.Module, Callable[..., Tensors]]


class Size(NamedTuple):
    length: int
    max_positions: int = 0  # of the model; 0: as long as the input
    width: int = 8
    heads: int = 2

    @property
    def positions(self) -> int:
        return self.max_positions or self.length


class Case(NamedTuple):
    """One comparison."""

    spec: str  # our encoding
    against: str  # whose code
    theirs: Callable[..., Theirs]  # builds their code
    sizes: tuple[Size, ...]  # what is compared
    inputs: tuple[str, ...] = ("x",)  # names of inputs (1, length, width)
    options: Mapping[str, Any] = MappingProxyType({})  # further arguments of `theirs`
    causal: bool = False  # a model that looks back
    # Absolute and relative, in float64; 1e-5 or 1e-6 where one of the two computes a part in
    # float32: angles, slopes, a scale.
    tolerance: float = 1e-12


def wav2vec2_bert(size: Size, max_distance: int) -> Theirs:
    from transformers.models.wav2vec2_bert import modeling_wav2vec2_bert as hf

    module = hf.Wav2Vec2BertSelfAttention(
        hf.Wav2Vec2BertConfig(
            hidden_size=size.width,
            num_attention_heads=size.heads,
            position_embeddings_type="relative_key",
            left_max_position_embeddings=max_distance,
            right_max_position_embeddings=max_distance,
        )
    )

    def run(x: Tensor) -> Tensors:
        output, weights = module(x, output_attentions=True)
        return {"output": output, "weights": weights}

    return module, run


def t5(size: Size, causal: bool, buckets: int = 32, max_distance: int = 128) -> Theirs:
    from transformers.models.t5.modeling_t5 import T5Attention, T5Config

    config = T5Config(
        d_model=size.width,
        d_kv=size.width // size.heads,
        num_heads=size.heads,
        is_decoder=causal,
        relative_attention_num_buckets=buckets,
        relative_attention_max_distance=max_distance,
    )
    module = T5Attention(config, has_relative_attention_bias=True, layer_idx=0)

    def run(x: Tensor) -> Tensors:
        mask = torch.zeros(size.length, size.length)
        if causal:
            mask = mask.masked_fill(_later(size.length), torch.finfo(mask.dtype).min)
        output = module(x, mask=mask[None, None])[0]
        return {"bias": module.compute_bias(size.length, size.length)[0], "output": output}

    return module, run


def deberta_v2(size: Size, buckets: int) -> Theirs:
    from transformers.models.deberta_v2.modeling_deberta_v2 import DebertaV2Config, DebertaV2Encoder

    encoder = DebertaV2Encoder(
        DebertaV2Config(
            hidden_size=size.width,
            num_attention_heads=size.heads,
            num_hidden_layers=1,
            max_position_embeddings=size.positions,
            relative_attention=True,
            position_buckets=buckets,
            pos_att_type=["c2p", "p2c"],
            share_att_key=True,
            norm_rel_ebd="layer_norm",
        )
    )
    attention = encoder.layer[0].attention.self
    parts = {"self": attention, "rel_embeddings": encoder.rel_embeddings, "norm": encoder.LayerNorm}

    def run(x: Tensor) -> Tensors:
        output, weights = attention(
            x,
            encoder.get_attention_mask(torch.ones(1, size.length)),
            output_attentions=True,
            relative_pos=encoder.get_rel_pos(x),
            rel_embeddings=encoder.get_rel_embedding(),
        )
        return {"output": output, "weights": weights}

    return nn.ModuleDict(parts), run


def wav2vec2_conformer(size: Size) -> Theirs:
    from transformers.models.wav2vec2_conformer import modeling_wav2vec2_conformer as hf

    config = hf.Wav2Vec2ConformerConfig(
        hidden_size=size.width,
        num_attention_heads=size.heads,
        position_embeddings_type="relative",
        max_source_positions=size.positions,
    )
    module = hf.Wav2Vec2ConformerSelfAttention(config)

    def run(x: Tensor) -> Tensors:
        sinusoids = hf.Wav2Vec2ConformerRelPositionalEmbedding(config)(x)
        output, weights = module(x, relative_position_embeddings=sinusoids)
        return {"output": output, "weights": weights}

    return module, run


def roformer(size: Size) -> Theirs:
    from transformers.models.roformer import modeling_roformer as hf

    def run(query: Tensor, key: Tensor) -> Tensors:
        table = hf.RoFormerSinusoidalPositionalEmbedding(size.length, size.width // size.heads)
        table.weight.data = table.create_weight()
        query, key = hf.RoFormerSelfAttention.apply_rotary_position_embeddings(
            table(query.shape)[None, None], _heads(query, size), _heads(key, size)
        )
        return {"query": query, "key": key}

    return nn.Module(), run


def llama(size: Size, scaling: dict[str, Any] | None = None) -> Theirs:
    from transformers.models.llama import modeling_llama as hf

    positions = size.positions
    if scaling and scaling["rope_type"] == "yarn":  # it gets the length before and after
        scaling = {**scaling, "original_max_position_embeddings": positions}
        positions = int(positions * scaling["factor"])
    given = {"max_position_embeddings": positions, "rope_scaling": scaling}
    config = hf.LlamaConfig(hidden_size=size.width, num_attention_heads=size.heads, **given)
    return nn.Module(), _half(hf, hf.LlamaRotaryEmbedding(config), size)


def gpt_neox(size: Size, fraction: float, base: float) -> Theirs:
    from transformers.models.gpt_neox import modeling_gpt_neox as hf

    config = hf.GPTNeoXConfig(
        hidden_size=size.width,
        num_attention_heads=size.heads,
        max_position_embeddings=size.positions,
        rotary_pct=fraction,
        rotary_emb_base=base,
    )
    return nn.Module(), _half(hf, hf.GPTNeoXRotaryEmbedding(config), size)


def _half(hf: Any, rotary: nn.Module, size: Size) -> Callable[..., Tensors]:
    def run(query: Tensor, key: Tensor) -> Tensors:
        cos, sin = rotary(query, torch.arange(size.length)[None])
        query, key = hf.apply_rotary_pos_emb(_heads(query, size), _heads(key, size), cos, sin)
        return {"query": query, "key": key}

    return run


def bloom(size: Size) -> Theirs:
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    def run() -> Tensors:
        # A constant in each row, which softmax ignores: here the diagonal becomes 0, as ours is.
        bias = build_alibi_tensor(torch.ones(1, size.length), size.heads, torch.float64)
        return {"bias": (bias - bias.transpose(1, 2)).masked_fill(_later(size.length), 0.0)}

    return nn.Module(), run


def distilbert(size: Size) -> Theirs:
    from transformers.models.distilbert.modeling_distilbert import create_sinusoidal_embeddings

    def run() -> Tensors:
        table = torch.empty(size.length, size.width)
        create_sinusoidal_embeddings(size.length, size.width, out=table)
        return {"vectors": table}

    return nn.Module(), run


def fsmt(size: Size) -> Theirs:
    from transformers.models.fsmt.modeling_fsmt import SinusoidalPositionalEmbedding

    def run() -> Tensors:
        table = SinusoidalPositionalEmbedding(2, size.width, padding_idx=1)  # it grows
        return {"vectors": table(torch.full((1, size.length), 5))[0]}

    return nn.Module(), run


def _later(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).triu(1)


def _heads(x: Tensor, size: Size) -> Tensor:
    """Return ``(B, H, T, D)`` of ``(B, T, C)``."""
    return x.unflatten(-1, (size.heads, -1)).transpose(1, 2)


LENGTHS = (Size(6), Size(1, 4), Size(40), Size(40, 64, width=24, heads=3))
LONG = (Size(12), Size(1), Size(40, width=24, heads=3), Size(300))
ROTATED = (Size(8, 4096, 16, 1), Size(1, 64, 32, 2), Size(200, 64, 64, 2), Size(128, 2048, 128, 2))
PLAIN = (Size(12), Size(1), Size(128, width=64))
ROPE: dict[str, Any] = {"inputs": ("query", "key"), "tolerance": 1e-5}

CASES = {
    "shaw_clipped": Case(
        "shaw(max_distance=2)",
        "Wav2Vec2-BERT, relative_key",
        wav2vec2_bert,
        LENGTHS,
        options={"max_distance": 2},
    ),
    "t5_encoder": Case("t5", "T5, encoder", t5, LONG, options={"causal": False}),
    "t5_decoder": Case("t5", "T5, decoder", t5, LONG, options={"causal": True}, causal=True),
    "t5_few_buckets": Case(
        "t5(num_buckets=8,max_distance=30)",
        "T5, decoder, 8 buckets",
        t5,
        LONG,
        options={"causal": True, "buckets": 8, "max_distance": 30},
        causal=True,
    ),
    "deberta_v2": Case(
        "deberta_v2(buckets=4)",
        "DeBERTa-v2, c2p and p2c",
        deberta_v2,
        (Size(9, 12), Size(3, 12), Size(9, 16), Size(70, 40, 24, 3)),
        options={"buckets": 4},
        tolerance=1e-6,
    ),
    "transformer_xl_both": Case(
        "transformer_xl",
        "Wav2Vec2-Conformer, relative",
        wav2vec2_conformer,
        LENGTHS,
        tolerance=1e-5,
    ),
    "rope": Case("rope", "RoFormer", roformer, ROTATED, **ROPE),
    "rope_half": Case("rope(layout=half)", "LLaMA", llama, ROTATED, **ROPE),
    "rope_fraction": Case(
        "rope(layout=half,fraction=0.25,base=500)",
        "GPT-NeoX, rotary_pct 0.25",
        gpt_neox,
        ROTATED,
        options={"fraction": 0.25, "base": 500.0},
        **ROPE,
    ),
    "rope_linear": Case(
        "rope(layout=half,scaling=linear:4)",
        "LLaMA, linear 4",
        llama,
        ROTATED,
        options={"scaling": {"rope_type": "linear", "factor": 4.0}},
        **ROPE,
    ),
    "rope_yarn": Case(
        "rope(layout=half,scaling=yarn:4)",
        "LLaMA, yarn 4",
        llama,
        ROTATED,
        options={"scaling": {"rope_type": "yarn", "factor": 4.0}},
        **ROPE,
    ),
    # Theirs grows with the input: base * (factor * length / max_positions - factor + 1)^(d/(d-2)).
    # At twice the model's length that is our ntk with factor + 1, at any other length another.
    "rope_ntk": Case(
        "rope(layout=half,scaling=ntk:4)",
        "LLaMA, dynamic 3 at twice its length",
        llama,
        (Size(8, 4, 16, 1), Size(128, 64, 64, 2)),
        options={"scaling": {"rope_type": "dynamic", "factor": 3.0}},
        **ROPE,
    ),
    **{
        f"alibi_{heads}": Case(
            "alibi",
            f"BLOOM, {heads} heads",
            bloom,
            tuple(Size(length, 0, heads, heads) for length in (6, 1, 128)),
            inputs=(),
            causal=True,
            tolerance=1e-5,
        )
        for heads in (5, 8, 12, 16)
    },
    "sinusoidal": Case("sinusoidal", "DistilBERT", distilbert, PLAIN, inputs=(), tolerance=1e-5),
    "sinusoidal_fairseq": Case(
        "sinusoidal(layout=fairseq)", "FSMT", fsmt, PLAIN, inputs=(), tolerance=1e-5
    ),
}


def draw(case: Case, size: Size) -> Tensors:
    """Return inputs and weights, multiples of 1/64."""
    module, _ = case.theirs(size, **case.options)
    shapes = {name: torch.Size((1, size.length, size.width)) for name in case.inputs}
    shapes.update((name, value.shape) for name, value in module.state_dict().items())
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, generator=generator).mul(32).round().double() / 64
        for name, shape in shapes.items()
    }


def compute(case: Case, size: Size, given: Tensors) -> Tensors:
    """Compute with transformers from given inputs and weights, in float64."""
    module, run = case.theirs(size, **case.options)
    module.load_state_dict({k: v for k, v in given.items() if k not in case.inputs})
    module.double().eval()
    with torch.no_grad():
        found = run(*(given[name] for name in case.inputs))
    return {name: value.double() for name, value in found.items()}
