"""Layers that differ: each computes what the formulas of its own encodings say."""

from __future__ import annotations

from argparse import Namespace

import pytest
import torch

from fairseq_posenc import registry, specs
from fairseq_posenc.api import SelfAttention, StackPositions
from fairseq_posenc.errors import UserError
from tests.helpers import oracles
from tests.helpers.formulas import awake, padding_of
from tests.helpers.tiny_models import PATTERNS, make_model, make_tokens, needs_causal
from tests.transformer.test_attention import LENGTH, attend_by_formula, scores_and_values

ALL = [*PATTERNS, "3*rope,none", "2*m4m,xpos", "rope,rope(base=500),m4(reset=true),alibi+m4m"]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("spec", ALL)
def test_each_layer_equals_the_formula_of_its_encodings(spec, causal):
    if (needs_causal(spec) and not causal) or ("t5" in spec and causal):
        return  # the oracle of t5 has the buckets of encoders
    direction = "lr" if causal else "both"
    positions = awake(StackPositions(spec, 16, 2, max_positions=20, causal=causal)).double()
    parsed = specs.parse(spec)
    embeddings = torch.randn(2, LENGTH, 16, dtype=torch.float64)
    padding = padding_of(LENGTH, -2, 2)
    x, shared = positions(embeddings, padding)
    for index in range(8):
        layer = SelfAttention(positions, layer=index).double().eval()
        awake(layer.encodings)
        found, _ = layer(x, shared)
        own = parsed.select_layers([index])
        modules = dict(layer.encodings.items())
        for name, item in parsed.shared_modules.items():
            if item in own.items:
                modules[item.name] = positions.shared[name]
        for row in range(2):
            real = ~padding[row]
            formula = scores_and_values(layer, str(own), x[row, real], modules)
            allowed = oracles.allowed(direction, int(real.sum()), int(real.sum()))
            expected = attend_by_formula(layer, str(own), *formula, allowed)
            torch.testing.assert_close(found[row, real], expected, rtol=1e-5, atol=1e-5)


def test_what_some_layers_share_is_one_module_computed_once(monkeypatch):
    positions = StackPositions("t5,none,t5+alibi,t5(num_buckets=16)", 16, 2, max_positions=20)
    computed = []
    cls = registry.get("t5")
    terms = cls.terms
    monkeypatch.setattr(cls, "terms", lambda self, *a: (computed.append(self), terms(self, *a))[1])
    assert list(positions.shared) == ["t5", "alibi", "t5_2"]
    positions(torch.zeros(1, 5, 16))
    assert [id(each) for each in computed] == [id(positions.shared[n]) for n in ("t5", "t5_2")]


@pytest.mark.parametrize(
    ("written", "canonical"),
    [
        ("rope,none", "rope,none"),
        ("rope , rope,rope,  none", "3*rope,none"),
        ("3*rope,1*none,rope,2*rope,none", "3*rope,none"),
        ("rope,rope", "rope"),
        ("2*none", "none"),
        ("none,learned", "learned"),
        ("2*learned+m4m,none", "2*learned+m4m,none"),
        ("m4m,m4m,learned", "2*learned+m4m,none"),
        ("alibi+rope,m4(max_distance=3,per_head=true)", None),
    ],
)
def test_specs_have_one_canonical_form(written, canonical):
    spec = specs.parse(written)
    if canonical is not None:
        assert str(spec) == canonical
    assert specs.parse(str(spec)) == spec


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("0*rope", "name from 1 to 1,000 layers"),
        ("999*rope,2*none", "name from 1 to 1,000 layers"),
        ("999999*rope", "name from 1 to 1,000 layers"),
        ("rope,", "cannot read position encoding"),
        ("3*", "cannot read position encoding"),
        ("x*rope", "cannot read position encoding"),
        ("rope,rop", "unknown position encoding 'rop'"),
        ("learned,sinusoidal", "learned and sinusoidal both act on the input"),
        ("rope,rope+xpos", "rope and xpos both act on the rotation"),
    ],
)
def test_lists_that_cannot_be_read_are_one_line(written, message):
    with pytest.raises(UserError, match=message):
        specs.parse(written)


def test_a_stack_has_a_layer():
    with pytest.raises(UserError, match="rope: no layer is selected"):
        specs.parse("rope").select_layers([])


@pytest.mark.parametrize("removed", ["none", "t5"])  # t5: a table that no other layer reads
@pytest.mark.parametrize("kept", ["0,2", "2,0"])  # fairseq keeps them in their order
def test_pruned_layers_keep_their_encodings_directions_and_weights(kept, removed):
    positions = {"position_encoding": f"rope,{removed},m4m", "attention_directions": "lr,both,rl"}
    whole = make_model("masked_lm", **positions)
    given = {"arch": "roberta_none_tiny", "encoder_layers_to_keep": kept}
    pruned = make_model("masked_lm", **positions, encoder_layers_to_keep=kept)
    pruned.load_state_dict(whole.state_dict(), model_cfg=Namespace(**given))
    stack = pruned.encoder.sentence_encoder
    assert str(stack.identity.positions) == "rope,m4m"
    assert [list(layer.self_attn.encodings) for layer in stack.layers] == [[], ["m4m"]]
    assert [layer.self_attn.direction for layer in stack.layers] == ["lr", "rl"]
    first, _, last = whole.encoder.sentence_encoder.layers
    for layer, kept_layer in zip(stack.layers, (first, last)):
        assert torch.equal(layer.fc1.weight, kept_layer.fc1.weight)


def test_directions_are_a_list_of_their_own():
    """Both lists begin with the first layer; that of directions ends with ``both``."""
    model = make_model("masked_lm", position_encoding="rope,none", attention_directions="lr")
    stack = model.encoder.sentence_encoder
    assert stack.settings.directions == ("lr", "both", "both")
    assert stack.identity.describe().startswith("trained with rope,none, attention directions lr")
    tokens = make_tokens()
    moved = torch.cat([torch.full((3, 2), 1), tokens], 1)
    torch.testing.assert_close(model(moved)[0][:, 2:], model(tokens)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "arch", "layers"),
    [
        ("masked_lm", "roberta_modern", "rope(base=160000,layout=half),2*rope(layout=half)+w"),
        ("causal_lm", "transformer_lm_smol", "3*rope(base=2000000,layout=half),none"),
    ],
)
def test_architectures_are_named_after_what_they_are(family, arch, layers):
    side = "encoder" if family == "masked_lm" else "decoder"
    model = make_model(family, arch, **{f"{side}_layers": 4})
    stack = model.encoder.sentence_encoder if side == "encoder" else model.decoder
    assert str(stack.identity.positions).startswith(layers)
