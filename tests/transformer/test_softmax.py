"""Temperatures, caps and sinks: the softmax that they make, on every backend, in every family."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial

import pytest
import torch

from fairseq_posenc.api import PositionEncoding, SelfAttention, StackPositions
from fairseq_posenc.backends import check, triton
from fairseq_posenc.errors import UserError
from tests.helpers.formulas import INPUTS, awake, padding_of, their_scores
from tests.helpers.products import product_of, some_of
from tests.helpers.terms import draft_call, terms_of
from tests.helpers.tiny_models import (
    COMPANIONS,
    COMPOSITIONS,
    assert_decoding_equals_full_pass,
    encoding_specs,
    logits,
    make_model,
    make_tokens,
    needs_causal,
)
from tests.helpers.uncompiled_flex import run_uncompiled
from tests.transformer.test_windows import visible

PAD, HEADS, WIDTH, LENGTH = 1, 2, 16, 17
SPECS = [
    s for s in ("none", *encoding_specs("scores", "rotation"), *COMPOSITIONS) if "values" not in s
]
OF_SOFTMAX = [
    "ssmax",
    "logn(length=5)",
    "llama4(length=4)",
    "ministral3(beta=0.3,length=3)",
    "sink",
    "sink(value=0)",
    "ssmax+sink",
    "ssmax+window(size=4)",
    "llama4(length=3)+sink+chunk(size=5)",
    "softcap(cap=0.7)",
    "llama4(length=3)+softcap(cap=0.4)+sink(value=0.3)+window(size=6)",
]
FEW = ["none", "rope", "t5", "m4m", "deberta", "tupe+reset", "m2"]


def temperature(spec: str, i: int, visible: int, factor: float) -> float:
    """Return the factor of the scores of query i, by the papers' formulas, one by one."""
    found = 1.0
    if "ssmax" in spec:
        found *= factor * math.log(visible)
    if "logn(length=5)" in spec:
        found *= max(1.0, math.log(i + 1) / math.log(5))
    for length in (3, 4):
        if f"llama4(length={length})" in spec:
            found *= 1 + 0.1 * math.log(1 + math.floor((i + 1) / length))
    if "ministral3(beta=0.3,length=3)" in spec:
        found *= 1 + 0.3 * math.log(1 + math.floor(i / 3))
    return found


def softmax(spec: str, scores: torch.Tensor, layer, direction: str) -> torch.Tensor:
    """Return the weights of one sentence, ``(heads, length, length)``, pair by pair."""
    limits = "+".join(x for x in spec.split("+") if x.startswith(("window", "chunk")))
    seen_by = visible(limits or "chunk(size=99)", direction, scores.size(1)).tolist()
    weights = []
    for h, rows in enumerate(scores.tolist()):
        factor = float(layer["ssmax"].factor[h]) if "ssmax" in layer else 1.0
        sink = -math.inf
        if "sink" in layer:
            fixed = layer["sink"].value
            sink = float(layer["sink"].score[h] if fixed is None else fixed)
        for i, row in enumerate(rows):
            tau = temperature(spec, i, sum(seen_by[i]), factor)
            scored = [tau * s for s in row]
            if "softcap" in layer:
                cap = layer["softcap"].cap
                scored = [cap * math.tanh(s / cap) for s in scored]
            powers = [math.exp(s) if seen else 0.0 for s, seen in zip(scored, seen_by[i])]
            total = sum(powers) + math.exp(sink)
            weights += [power / total for power in powers]
    return torch.tensor(weights, dtype=scores.dtype).view_as(scores)


def attended(spec: str, backends: Iterable[str], causal: bool, direction: str):
    """Compute a layer on backends, with padding on both sides, and the formula."""
    torch.manual_seed(3)
    encoding = awake(PositionEncoding(spec, WIDTH, HEADS, 20, causal)).double()
    query, key, value = torch.randn(3, 2, HEADS, LENGTH, 8, dtype=torch.float64).unbind()
    padding = padding_of(LENGTH, 4, -3)
    with torch.no_grad():
        inputs = torch.zeros(2, LENGTH, WIDTH, dtype=torch.float64)
        for b in range(2):
            inputs[b, ~padding[b]] = INPUTS[: int((~padding[b]).sum())]
        ours = [
            encoding.attend(query, key, value, padding, direction, backend=backend, inputs=inputs)
            for backend in backends
        ]
        modules = {**encoding.shared.as_dict(), **encoding.encodings.as_dict()}
        expected = torch.zeros_like(query)
        built = torch.nn.ModuleDict(modules)
        for b in range(2):
            real = ~padding[b]
            plain = "+".join(x for x in spec.split("+") if x.split("(")[0] not in COMPANIONS)
            scores = their_scores(built, plain or "none", query[b, :, real], key[b, :, real])
            expected[b, :, real] = softmax(spec, scores, built, direction) @ value[b, :, real]
    kept = ~padding[:, None, :, None]
    return [each * kept for each in ours], expected * kept


@pytest.mark.parametrize(("spec", "softmax_spec"), product_of(FEW, OF_SOFTMAX))
def test_equals_the_formula_on_every_backend(spec, softmax_spec, monkeypatch):
    run_uncompiled(monkeypatch)
    backends = ["reference", "blocked", "flex"]
    if spec in ("none", "rope") and not any(x in softmax_spec for x in ("softcap", "sink")):
        backends.append("sdpa")  # which refuses the others
    # Each of the encodings, and each of the softmaxes, has every direction with some of the others.
    direction = ("both", "lr", "rl")[(FEW.index(spec) + OF_SOFTMAX.index(softmax_spec)) % 3]
    found, expected = attended(f"{spec}+{softmax_spec}", backends, False, direction)
    for ours in found:
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("spec", some_of([spec for spec in SPECS if "(" not in spec], SPECS))
def test_equals_the_formula_with_every_encoding(spec):
    softmax_spec = ("ssmax+sink", "logn(length=5)", "softcap(cap=0.7)")[SPECS.index(spec) % 3]
    causal = needs_causal(spec)
    direction = "lr" if causal else "both"
    (ours,), expected = attended(f"{spec}+{softmax_spec}", ["auto"], causal, direction)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("spec", "softmax_spec"), product_of(FEW, OF_SOFTMAX))
def test_gradients_on_every_backend_are_those_of_the_equation(spec, softmax_spec):
    torch.manual_seed(3)
    layer = awake(PositionEncoding(f"{spec}+{softmax_spec}", WIDTH, HEADS, 96, True)).double()
    inputs = [torch.randn(2, HEADS, 70, 8, dtype=torch.float64).requires_grad_() for _ in range(3)]
    padding = padding_of(70, 4, -5)
    weights = torch.randn(2, HEADS, 70, 8, dtype=torch.float64) * ~padding[:, None, :, None]
    inputs += layer.parameters()

    def gradients(backend: str) -> tuple:
        attended = layer.attend(*inputs[:3], padding, backend=backend)
        return torch.autograd.grad((attended * weights).sum(), inputs, allow_unused=True)

    expected = gradients("reference")
    for backend in ("blocked", "sdpa"):
        try:
            found = gradients(backend)
        except UserError:
            assert backend == "sdpa"
            continue
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)


def test_a_cap_has_gradients_of_second_order():
    layer = awake(PositionEncoding("t5+softcap(cap=0.7)", WIDTH, HEADS, 20, True)).double()
    torch.manual_seed(3)
    inputs = [torch.randn(1, HEADS, 4, 8, dtype=torch.float64).requires_grad_() for _ in range(3)]
    assert torch.autograd.gradgradcheck(partial(layer.attend, backend="reference"), inputs)


def test_a_cap_bounds_the_odds_of_two_keys():
    layer = PositionEncoding("none+softcap(cap=2)", WIDTH, HEADS)
    query, key = torch.ones(1, HEADS, 2, 8), torch.ones(1, HEADS, 2, 8)
    key[:, :, 1] = -1
    value = torch.eye(2).expand(1, HEADS, 2, 2)  # not as wide as the keys: the results are weights
    weights = layer.attend(1e6 * query, key, value, backend="reference")[0, 0, 0]
    assert float(weights[0] / weights[1]) == pytest.approx(math.exp(4), rel=1e-5)


def test_dropout_acts_on_what_the_sink_has_left():
    layer = PositionEncoding("none+sink(value=1)", WIDTH, HEADS, causal=True)
    query, key = torch.zeros(2, 1, HEADS, 400, 8)
    value = torch.ones(1, HEADS, 400, 8)
    seen = torch.arange(1, 401)
    left = seen / (seen + math.e)
    for backend in ("reference", "blocked"):
        torch.manual_seed(0)
        dropped = layer.attend(query, key, value, dropout=0.4, backend=backend)[0, :, :, 0]
        assert (dropped - left).abs().max() > 0.01
        assert dropped[:, 200:].mean() == pytest.approx(float(left[200:].mean()), abs=0.02)


@pytest.mark.parametrize(
    ("softmax_spec", "family"), product_of(OF_SOFTMAX, ["causal_lm", "translation"])
)
def test_decoding_with_beams_equals_the_full_pass(softmax_spec, family):
    model = make_model(family, position_encoding=f"t5+{softmax_spec},tupe+{softmax_spec}")
    awake(model.decoder)
    source = make_tokens(2, padding=2)
    orders = [[0, 1], [0, 1], [1, 1] if family == "causal_lm" else [0, 1], *[[0, 1]] * 6]
    assert_decoding_equals_full_pass(model, family, source, orders, tolerance=1e-4)


@pytest.mark.parametrize(
    ("softmax_spec", "family"), product_of(OF_SOFTMAX, ["masked_lm", "causal_lm"])
)
def test_padding_and_documents_change_nothing(softmax_spec, family):
    """A document in a block, with padding on either side, gives what it gives alone."""
    model = make_model(family, position_encoding=f"rope+{softmax_spec}+documents,m4m")
    awake(model)
    first, second = ([0, 5, 6, 7, 2], [8, 9, 10, 2])
    if family == "causal_lm":
        first, second = ([2, 5, 6, 7, 11], [2, 9, 10, 4])
    alone = [logits(model, family, torch.tensor([part]))[0] for part in (first, second)]
    rows = [[*first, *second, PAD, PAD], [PAD, PAD, *first, *second]]
    for row, start in zip(rows, (0, 2)):
        block = logits(model, family, torch.tensor([row]))[0][start : start + 9]
        torch.testing.assert_close(block, torch.cat(alone), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("softmax_spec", "dtype"), product_of(OF_SOFTMAX, [torch.float16, torch.bfloat16])
)
def test_half_precision_is_close_to_float64(softmax_spec, dtype):
    for spec in ("none", "t5", "m4m"):
        torch.manual_seed(3)
        positions = StackPositions(f"{spec}+{softmax_spec}", WIDTH, HEADS, 64, causal=True)
        layer = SelfAttention(positions).to(dtype)
        positions.to(dtype)
        x = torch.randn(2, 60, WIDTH).to(dtype)
        half = layer(*positions(x))[0]
        exact = layer.double()(*positions.double()(x.double()))[0]
        error = (half.double() - exact).abs().max() / exact.abs().max()
        assert error < {torch.float16: 8e-3, torch.bfloat16: 6e-2}[dtype]


def test_scalable_softmax_starts_as_plain_attention_on_average():
    for causal, counts in ((True, torch.arange(1, 513)), (False, torch.tensor([512]))):
        layer = PositionEncoding("ssmax", WIDTH, HEADS, 512, causal)
        factors = layer.encodings["ssmax"].factor[0] * counts.log()
        assert float(factors.mean()) == pytest.approx(1.0, abs=1e-5)
    start = PositionEncoding("ssmax(offset=true)", WIDTH, HEADS, 512).encodings["ssmax"]
    assert (start.factor.tolist(), start.offset.tolist()) == ([0.0] * HEADS, [1.0] * HEADS)


def test_a_fixed_sink_has_no_parameters_and_a_trained_one_a_number_for_each_head():
    assert not list(PositionEncoding("sink(value=-2.5)", WIDTH, HEADS).parameters())
    sink = PositionEncoding("sink", WIDTH, HEADS)
    assert sink.parameter_counts() == {"encodings.sink.score": HEADS}


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("rope+sink(value=x)", r"sink\(value=x\): expected a finite number"),
        ("rope+sink(value=inf)", "expected a finite number"),
        ("sink+sink(value=0)", "sink is named twice"),
        ("logn+llama4", "two encodings both have a temperature: choose one"),
        ("llama4(beta=0)", r"beta=0\): must be from 1e-06 to 1,000,000,000,000, not 0"),
        ("softcap(cap=-1)", r"cap=-1\): must be from 1e-06 to 1,000,000,000,000, not -1"),
    ],
)
def test_what_cannot_be_is_one_line(spec, message):
    with pytest.raises(UserError, match=message):
        PositionEncoding(spec, WIDTH, HEADS)


def test_what_backends_cannot_do_is_one_line():
    with pytest.raises(UserError, match="sdpa cannot compute this: a temperature multiplies"):
        check("sdpa", terms_of(bias=torch.ones(1, 1), count_temperature=torch.ones(2)), 8)
    with pytest.raises(UserError, match="triton cannot compute this"):
        check("triton", terms_of(sink=torch.ones(2)), 8)
    assert "no temperature, cap" in triton.refuses(draft_call(terms_of(softcap=50.0), "meta"))
    with pytest.raises(UserError, match="sdpa cannot compute this: torch's attention has no cap"):
        check("sdpa", terms_of(softcap=50.0), 8)
