"""Models of transformers whose layers differ: each attention equals the library's, by its layer."""

from __future__ import annotations

import pytest
import torch
import transformers

from fairseq_posenc import specs
from fairseq_posenc.api import PositionEncoding, SelfAttention, StackPositions
from tests.helpers.formulas import padding_of

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


def llama4(temperature=False):
    dense = {"interleave_moe_layer_step": 99, "intermediate_size_mlp": 48, "num_local_experts": 1}
    plain = {**dense, "use_qk_norm": False, "attn_temperature_tuning": temperature}
    config = transformers.Llama4TextConfig(
        **SIZES, **plain, attention_chunk_size=5, head_dim=8, rope_theta=500000.0, floor_scale=4
    )
    without_rope = "llama4(length=4)" if temperature else "none"
    return f"3*rope(base=500000)+chunk(size=5),{without_rope}", transformers.Llama4TextModel(config)


def attended(model, padding):
    """Run a model; return what each of its attentions was given, and what it gave."""
    found = []

    def note(module, args, kwargs, output):
        found.append((kwargs.get("hidden_states", args[0] if args else None), output[0]))

    attentions = [layer.self_attn for layer in model.layers]
    for attention in attentions:
        attention.register_forward_hook(note, with_kwargs=True)
    tokens = torch.randint(3, 50, padding.shape).masked_fill(padding, 1)
    with torch.no_grad():
        model.eval()(input_ids=tokens, attention_mask=(~padding).long())
    return attentions, found


def ours(positions, index, theirs):
    layer = SelfAttention(positions, layer=index, bias=False, num_key_value_heads=2).eval()
    mine = (layer.q_proj, layer.k_proj, layer.v_proj, layer.out_proj)
    for part, their_part in zip(mine, (theirs.q_proj, theirs.k_proj, theirs.v_proj, theirs.o_proj)):
        part.load_state_dict(their_part.state_dict())
    return layer


@pytest.mark.parametrize("side", ["right", "left"])
def test_llama_4s_chunks_equal_the_librarys(side):
    torch.manual_seed(1)
    spec, model = llama4()
    compare(spec, model, padding_of(23, 0, -4 if side == "right" else 4))


def test_llama_4s_temperature_equals_the_librarys():
    """With padding on the right: on the left it shifts transformers' positions, and not ours."""
    torch.manual_seed(1)
    spec, model = llama4(temperature=True)
    compare(spec, model, padding_of(23, 0, -4))
    with pytest.raises(AssertionError, match="not close"):
        compare(spec, model, padding_of(23, 0, 4))


def compare(spec, model, padding):
    attentions, found = attended(model, padding)
    assert len(found) == LAYERS
    positions = StackPositions(spec, WIDTH, HEADS, max_positions=64, causal=True)
    _, shared = positions(torch.zeros(2, 23, WIDTH), padding)
    for index, (theirs, (given, expected)) in enumerate(zip(attentions, found)):
        mine, _ = ours(positions, index, theirs)(given, shared)
        real = ~padding
        torch.testing.assert_close(mine[real], expected[real], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("side", ["right", "left"])
def test_gemma_3s_attention_equals_the_librarys_between_its_norms(side, causal):
    """Queries and keys are normed before they are rotated: they are made by the model itself."""
    torch.manual_seed(1)
    spec = "5*rope(layout=half)+window(size=6),rope(base=1000000,layout=half)"
    sizes = {**SIZES, "sliding_window": 6, "head_dim": 8, "query_pre_attn_scalar": 8}
    config = transformers.Gemma3TextConfig(**sizes, use_bidirectional_attention=not causal)
    model = transformers.Gemma3TextModel(config)
    padding = padding_of(23, 0, -4 if side == "right" else 4)
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
