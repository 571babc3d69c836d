"""The attention module against the formulas: directions, padding, decoding, precision."""

from __future__ import annotations

import math

import pytest
import torch

from fairseq_posenc import specs
from fairseq_posenc.assembly import build_encodings
from fairseq_posenc.errors import UserError
from tests.helpers import formulas, oracles
from tests.helpers.lone_attention import LoneAttention
from tests.helpers.products import product_of, some_of
from tests.helpers.tiny_models import COMPOSITIONS, directions, encoding_specs, needs_causal

SPECS = ["none", *encoding_specs("scores", "rotation"), *COMPOSITIONS]
# Every encoding once; its options as well where they change what a cache holds.
DECODED = [spec for spec in SPECS if "(" not in spec or "reset" in spec or "layout" in spec]
LENGTH = 17  # beyond the 16 keys that kernels handle apart


def make(spec: str, direction: str = "both", backend: str = "auto", causal=False, **kwargs):
    dims = formulas.DIMS._replace(causal=causal or needs_causal(spec))
    parsed = specs.parse(spec)
    # Shared encodings too are put into the layer here: a stack only passes their terms on.
    built = build_encodings({**parsed.layer_modules(0), **parsed.shared_modules}, dims)
    attention = LoneAttention(16, 2, built, direction, backend, **kwargs).double().eval()
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    formulas.awake(attention.encodings)
    return attention


@torch.no_grad()
def scores_and_values(attention, spec, x, encodings=None):
    """Compute by the oracles the scores of one sentence without padding ``(length, 16)``.

    ``encodings`` are the layer's with those that a stack shares, if it has any.
    """

    def heads(projection):
        return projection(x).view(len(x), 2, 8).transpose(0, 1)

    query, key, value = (heads(p) for p in (attention.q_proj, attention.k_proj, attention.v_proj))
    projections = {"project_query": attention.q_proj, "project_key": attention.k_proj}
    encodings = encodings or attention.encodings
    return formulas.their_scores(encodings, spec, query, key, x, **projections), value


@torch.no_grad()
def attend_by_formula(attention, spec, scores, value, allowed):
    """Attend one sentence by the oracles: ``(length, 16)``."""
    values = [i for i in specs.parse(spec).items if i.name == "shaw_values"]
    if values:
        params = formulas.oracle_params(attention.encodings, "shaw_values")
        params = {"value_table": params["table"]}
        attended = oracles.shaw_values(
            scores, value, allowed, params, formulas.oracle_options(values[0])
        )
    else:
        attended = oracles.attention(scores, value, allowed)
    return attention.out_proj(attended.transpose(0, 1).flatten(1))


@pytest.mark.parametrize("spec", some_of(DECODED, SPECS))
def test_equals_the_formula_with_padding_on_either_side(spec):
    x = torch.randn(LENGTH, 2, 16, dtype=torch.float64)
    padding = formulas.padding_of(LENGTH, -2, 2)
    first = make(spec, directions(spec)[0])
    by_formula = [scores_and_values(first, spec, x[~padding[b], b]) for b in range(2)]
    ways = directions(spec)
    if "(" in spec:  # encodings meet all directions, their options some in turn
        ways = some_of([ways[SPECS.index(spec) % len(ways)]], ways)
    for direction in ways:
        attention = make(spec, direction)
        attention.load_state_dict(first.state_dict())
        ours, _ = attention(x, x, x, key_padding_mask=padding)
        for b in range(2):
            # Values at padding do not matter, but they must be finite.
            real = ~padding[b]
            allowed = oracles.allowed(direction, int(real.sum()), int(real.sum()))
            theirs = attend_by_formula(attention, spec, *by_formula[b], allowed)
            torch.testing.assert_close(ours[real, b], theirs, rtol=1e-5, atol=1e-5)
            blind = ~oracles.allowed(direction, LENGTH, LENGTH, padding[b]).any(-1)
            zeros = attention.out_proj.bias.expand(int(blind.sum()), -1)
            torch.testing.assert_close(ours[blind, b], zeros)
        assert ours.isfinite().all()


@pytest.mark.parametrize(("spec", "direction"), product_of(SPECS, ["both", "lr", "rl"]))
def test_no_nan_in_outputs_or_gradients_with_rows_of_padding_alone(spec, direction):
    attention = make(spec, direction)
    x = torch.randn(LENGTH, 2, 16, dtype=torch.float64, requires_grad=True)
    out, _ = attention(x, x, x, key_padding_mask=formulas.padding_of(LENGTH, 0, LENGTH))
    out.sum().backward()
    assert out.isfinite().all()
    assert x.grad.isfinite().all()
    assert all(p.grad is None or p.grad.isfinite().all() for p in attention.parameters())


@pytest.mark.parametrize("spec", some_of(DECODED, SPECS))
def test_decoding_with_beam_reordering_equals_the_full_pass(spec):
    attention = make(spec, "lr", causal=True)  # as in decoders
    x = torch.randn(LENGTH, 4, 16, dtype=torch.float64)
    orders = [torch.randperm(4) for _ in range(LENGTH)]
    state: dict = {}
    steps = []
    history = x[:0]
    for step in range(LENGTH):
        history = torch.cat([history, x[step : step + 1]])
        last = history[-1:]
        steps.append(attention(last, last, last, incremental_state=state)[0])
        full, _ = attention(history, history, history)
        torch.testing.assert_close(steps[-1], full[-1:], rtol=1e-5, atol=1e-5)
        attention.reorder_incremental_state(state, orders[step])
        history = history[:, orders[step]]


# Largest error of an output, relative to the largest output, in fp16 and bf16, where the content
# scores have a standard deviation of 1 to 5, as in trained models. Of 40 draws of
# rope(scaling=linear:4) in fp16, half are below 8e-4, and the worst is 2.9e-3.
USUAL_BOUNDS = {torch.float16: 3e-3, torch.bfloat16: 1.6e-2}
# A product multiplies the roundings of three factors, and its scores are far larger.
BOUNDS = {"m4m": {torch.float16: 3e-2, torch.bfloat16: 1.2e-1}}


@pytest.mark.parametrize(("spec", "dtype"), product_of(SPECS, [torch.float16, torch.bfloat16]))
def test_half_precision_is_close_to_float64(spec, dtype):
    attention = make(spec).to(dtype).double()
    # YaRN multiplies queries and keys by 0.1 ln 4 + 1: smaller inputs keep the spread of scores.
    factor = 0.1 * math.log(4) + 1 if "yarn:4" in spec else 1
    x = (torch.randn(LENGTH, 3, 16, dtype=torch.float64) / factor).to(dtype).double()
    query, key = (p(x).unflatten(-1, (2, 8)) for p in (attention.q_proj, attention.k_proj))
    content = torch.einsum("tbhd,sbhd->bhts", query, key) / 8**0.5
    assert 1 < content.std() < 5
    exact, _ = attention(x, x, x)
    half, _ = attention.to(dtype)(*[x.to(dtype)] * 3)
    assert half.dtype == dtype
    bound = BOUNDS.get("m4m" if "m4m" in spec else "", USUAL_BOUNDS)[dtype]
    assert (half.double() - exact).abs().max() / exact.abs().max() < bound


def test_product_of_three_terms_does_not_overflow_half_precision():
    """Each dot product is about 50; their product, 125,000, is beyond fp16's 65,504."""
    attention = make("m4m").half()
    with torch.no_grad():
        for projection in (attention.q_proj, attention.k_proj):
            projection.weight.zero_()
            projection.bias.fill_(2.5)
        attention.encodings["m4m"].table.weight.fill_(2.5)
    x = torch.randn(LENGTH, 1, 16, dtype=torch.float16)
    out, _ = attention(x, x, x)
    assert out.isfinite().all()


def test_weights_are_returned_on_request():
    attention = make("m4m", "lr")
    x = torch.randn(LENGTH, 3, 16, dtype=torch.float64)
    plain, none = attention(x, x, x, need_weights=False)
    out, mean = attention(x, x, x, need_weights=True)
    _, heads = attention(x, x, x, need_head_weights=True)
    assert none is None
    torch.testing.assert_close(plain, out)
    assert heads.shape == (2, 3, LENGTH, LENGTH)
    torch.testing.assert_close(heads.mean(0), mean)
    torch.testing.assert_close(mean.sum(-1), torch.ones(3, LENGTH, dtype=torch.float64))


def test_pairs_masked_by_an_encoder_mask_are_not_seen():
    """fairseq turns what it forbids into -1e8; here it is a mask, whatever the scores are."""
    attention = make("m4")
    x = torch.randn(LENGTH, 1, 16, dtype=torch.float64)
    mask = torch.zeros(LENGTH, LENGTH, dtype=torch.float64)
    mask[:, 2] = -1e8
    _, weights = attention(x, x, x, attn_mask=mask)
    assert weights[0, :, 2].abs().max() == 0


def test_dropout_acts_in_training_alone():
    attention = make("m4", dropout=0.5)
    x = torch.randn(LENGTH, 2, 16, dtype=torch.float64)
    still = attention(x, x, x)[0]
    torch.testing.assert_close(still, attention(x, x, x)[0])
    attention.train()
    assert not torch.allclose(still, attention(x, x, x)[0])


@pytest.mark.parametrize("option", [{"add_bias_kv": True}, {"add_zero_attn": True}])
def test_extra_keys_without_a_position_are_refused(option):
    with pytest.raises(UserError, match="added key biases"):
        make("m4", **option)


@pytest.mark.parametrize("option", ["static_kv", "before_softmax"])
def test_options_of_other_attention_are_refused(option):
    x = torch.randn(LENGTH, 2, 16, dtype=torch.float64)
    with pytest.raises(UserError, match="static_kv and before_softmax have no meaning"):
        make("m4")(x, x, x, **{option: True})
