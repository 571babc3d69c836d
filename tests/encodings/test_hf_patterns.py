"""Models of transformers whose layers differ: each attention equals the library's, by its layer."""

from __future__ import annotations

import pytest
import torch

from fairseq_posenc import specs
from fairseq_posenc.api import PositionEncoding, SelfAttention, StackPositions

transformers = pytest.importorskip("transformers")
WIDTH, HEADS, LAYERS = 32, 4, 8
SIZES = {
    "hidden_size": WIDTH,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "num_hidden_layers": LAYERS,
    "intermediate_size": 48,
    "vocab_size": 50,
    "max_position_embeddings": 64,
    "pad_token_id": 1,
    "attn_implementation": "eager",
}


def smollm3():
    config = transformers.SmolLM3Config(**SIZES, rope_theta=2e6, head_dim=8)
    return "3*rope(base=2000000,layout=half),none", transformers.SmolLM3Model(config)


def cohere2():
    config = transformers.Cohere2Config(**SIZES, sliding_window=6, head_dim=8)
    return "3*rope+window(size=6),none", transformers.Cohere2Model(config)


def mistral():
    config = transformers.MistralConfig(**SIZES, sliding_window=5, head_dim=8)
    return "rope(layout=half)+window(size=5)", transformers.MistralModel(config)


def llama4(temperature=False):
    dense = {"interleave_moe_layer_step": 99, "intermediate_size_mlp": 48, "num_local_experts": 1}
    plain = {**dense, "use_qk_norm": False, "attn_temperature_tuning": temperature}
    config = transformers.Llama4TextConfig(
        **SIZES, **plain, attention_chunk_size=5, head_dim=8, rope_theta=500000.0, floor_scale=4
    )
    without_rope = "llama4(length=4)" if temperature else "none"
    return f"3*rope(base=500000)+chunk(size=5),{without_rope}", transformers.Llama4TextModel(config)


def gpt_oss():
    more = {"sliding_window": 6, "head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1}
    rope = {"rope_type": "default", "rope_theta": 150000.0}
    config = transformers.GptOssConfig(**SIZES, **more, rope_parameters=rope)
    model = transformers.GptOssModel(config)
    for layer in model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks)
    spec = "rope(base=150000,layout=half)+sink"
    return f"{spec}+window(size=6),{spec}", model


def gemma2():
    more = {"sliding_window": 6, "head_dim": 8, "query_pre_attn_scalar": 8}
    config = transformers.Gemma2Config(**{**SIZES, **more}, attn_logit_softcapping=0.5)
    model = transformers.Gemma2Model(config)
    for layer in model.layers:  # scores beyond the cap
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            torch.nn.init.normal_(projection.weight, std=0.3)
    spec = "rope(layout=half)+softcap(cap=0.5)"
    return f"{spec}+window(size=6),{spec}", model


def modernbert():
    sizes = {name: x for name, x in SIZES.items() if name != "num_key_value_heads"}
    config = transformers.ModernBertConfig(**sizes, local_attention=8, reference_compile=False)
    spec = "rope(base=160000,layout=half),2*rope(layout=half)+window(size=8)"
    return spec, transformers.ModernBertModel(config)


MODELS = {
    "smollm3": smollm3,
    "cohere2": cohere2,
    "mistral": mistral,
    "llama4": llama4,
    "gpt_oss": gpt_oss,
    "gemma2": gemma2,
}


def attended(model, padding):
    """Run a model; return what each of its attentions was given, and what it gave."""
    found = []

    def note(module, args, kwargs, output):
        found.append((kwargs.get("hidden_states", args[0] if args else None), output[0]))

    layers = model.layers
    attentions = [getattr(layer, "self_attn", None) or layer.attn for layer in layers]
    for attention in attentions:
        attention.register_forward_hook(note, with_kwargs=True)
    tokens = torch.randint(3, 50, padding.shape).masked_fill(padding, 1)
    with torch.no_grad():
        model.eval()(input_ids=tokens, attention_mask=(~padding).long())
    return attentions, found


def ours(positions, index, theirs, causal):
    sinks = getattr(theirs, "sinks", None)
    layer = SelfAttention(
        positions, layer=index, bias=sinks is not None, num_key_value_heads=2 if causal else None
    ).eval()
    mine = (layer.q_proj, layer.k_proj, layer.v_proj, layer.out_proj)
    if causal:
        parts = [theirs.q_proj, theirs.k_proj, theirs.v_proj, theirs.o_proj]
        for part, their_part in zip(mine, parts):
            part.load_state_dict(their_part.state_dict())
    else:
        for part, weight in zip(mine, [*theirs.Wqkv.weight.chunk(3), theirs.Wo.weight]):
            part.weight.data.copy_(weight)
    if sinks is not None:
        layer.encodings["sink"].score.data.copy_(sinks)
    return layer


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", [*MODELS, "modernbert"])
def test_each_attention_equals_the_librarys(name, side):
    torch.manual_seed(1)
    causal = name != "modernbert"
    spec, model = MODELS[name]() if causal else modernbert()
    padding = torch.zeros(2, 23, dtype=torch.bool)
    if side == "right":
        padding[1, -4:] = True
    else:
        padding[1, :4] = True
    compare(spec, model, padding, causal)


def test_llama_4s_temperature_equals_the_librarys():
    """With padding on the right: on the left it shifts transformers' positions, and not ours."""
    torch.manual_seed(1)
    spec, model = llama4(temperature=True)
    padding = torch.zeros(2, 23, dtype=torch.bool)
    padding[1, -4:] = True
    compare(spec, model, padding, causal=True)
    with pytest.raises(AssertionError, match="not close"):
        compare(spec, model, padding.flip(1), causal=True)


def compare(spec, model, padding, causal):
    attentions, found = attended(model, padding)
    assert len(found) == LAYERS
    positions = StackPositions(spec, WIDTH, HEADS, max_positions=64, causal=causal)
    _, shared = positions(torch.zeros(2, 23, WIDTH), padding)
    for index, (theirs, (given, expected)) in enumerate(zip(attentions, found)):
        mine, _ = ours(positions, index, theirs, causal)(given, shared)
        real = ~padding
        torch.testing.assert_close(mine[real], expected[real], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("side", ["right", "left"])
def test_gemma_3s_attention_equals_the_librarys_between_its_norms(side, causal):
    """Queries and keys are normed before they are rotated: they are made by the model itself."""
    torch.manual_seed(1)
    spec = "5*rope(layout=half)+window(size=6),rope(base=1000000,layout=half)"
    config = transformers.Gemma3TextConfig(
        **SIZES,
        sliding_window=6,
        head_dim=8,
        query_pre_attn_scalar=8,
        use_bidirectional_attention=not causal,
    )
    model = transformers.Gemma3TextModel(config)
    padding = torch.zeros(2, 23, dtype=torch.bool)
    padding[1, -4:] = side == "right"
    padding[1, :4] = side == "left"
    attentions, found = attended(model, padding)
    parsed = specs.parse(spec)
    for index, (theirs, (given, expected)) in enumerate(zip(attentions, found)):
        query, key, value = (
            projection(given).unflatten(-1, (-1, 8)).transpose(1, 2)
            for projection in (theirs.q_proj, theirs.k_proj, theirs.v_proj)
        )
        key, value = (x.repeat_interleave(2, 1) for x in (theirs.k_norm(key), value))
        positions = PositionEncoding(str(parsed.select_layers([index])), WIDTH, HEADS, 64, causal)
        mine = positions.attend(theirs.q_norm(query), key, value, padding)
        mine = theirs.o_proj(mine.transpose(1, 2).flatten(2))
        torch.testing.assert_close(mine[~padding], expected[~padding], rtol=1e-5, atol=1e-5)
