"""Gates, polar and counted positions: what they make of attention, on every backend."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch

from fairseq_posenc import registry
from fairseq_posenc.api import PositionEncoding, SelfAttention, StackPositions
from fairseq_posenc.backends import BACKENDS, check, flex
from fairseq_posenc.encodings.term import Decay
from fairseq_posenc.errors import UserError
from tests.helpers import oracles
from tests.helpers.formulas import awake, padding_of, their_scores
from tests.helpers.products import product_of
from tests.helpers.terms import draft_call, terms_of
from tests.helpers.uncompiled_flex import run_uncompiled

HEADS, WIDTH, HEAD_DIM, LENGTH = 2, 16, 8, 17
GATED = ["fox", "rope+fox", "t5+fox", "m4m+fox", "pope", "pope+fox", "pope+alibi"]
COUNTED = ["cope", "rope+cope", "cope+fox"]


def draw(causal: bool, spec: str, length: int = LENGTH, dtype: torch.dtype = torch.float64):
    """Return a layer's positions, queries, keys, values, inputs, and padding on both sides."""
    torch.manual_seed(3)
    encoding = awake(PositionEncoding(spec, WIDTH, HEADS, max(length, 20), causal)).to(dtype)
    tensors = [*torch.randn(3, 2, HEADS, length, HEAD_DIM, dtype=dtype).unbind()]
    tensors.append(torch.randn(2, length, WIDTH, dtype=dtype))
    return encoding, tensors, padding_of(length, 4, -3)


@pytest.mark.parametrize("spec", [*GATED, *COUNTED])
@torch.no_grad()
def test_equals_the_formula_on_every_backend(spec, monkeypatch):
    run_uncompiled(monkeypatch)
    cases = [(True, "lr"), (False, "both"), (False, "lr"), (False, "rl")]
    served = set()
    for causal, direction in cases[: 1 if spec in COUNTED else 2 if "+" in spec else None]:
        encoding, (query, key, value, inputs), padding = draw(causal, spec)
        found = {}
        for backend in ("reference", "blocked", "sdpa", "flex"):
            with suppress(UserError):
                found[backend] = encoding.attend(
                    query, key, value, padding, direction, backend=backend, inputs=inputs
                )
        served |= found.keys()
        for b in range(2):
            real = ~padding[b]
            built = torch.nn.ModuleDict(encoding.shared.as_dict() | encoding.encodings.as_dict())
            given = query[b, :, real], key[b, :, real], inputs[b, real]
            theirs = their_scores(built, spec, *given, bidirectional=not causal)
            visible = oracles.allowed(direction, int(real.sum()), int(real.sum()))
            expected = oracles.attention(theirs, value[b, :, real], visible)
            for ours in found.values():
                torch.testing.assert_close(ours[b, :, real], expected, rtol=1e-5, atol=1e-5)
    refused = {"blocked", "sdpa", "flex"} if spec in COUNTED else set()
    refused |= {name for name, term in (("flex", "fox"), ("sdpa", "m4m")) if term in spec}
    assert {"reference", "blocked", "sdpa", "flex"} - served == refused


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("spec", [*GATED, "fox+ssmax+sink+window(size=9)"])
def test_gradients_on_every_backend_are_those_of_the_reference(spec, causal):
    encoding, tensors, padding = draw(causal, spec, length=70)
    leaves = [x.requires_grad_() for x in tensors] + list(encoding.parameters())
    query, key, value, inputs = tensors
    weights = torch.randn_like(value) * ~padding[:, None, :, None]

    def gradients(backend: str, direction: str) -> tuple:
        attended = encoding.attend(
            query, key, value, padding, direction, backend=backend, inputs=inputs
        )
        return torch.autograd.grad((attended * weights).sum(), leaves, allow_unused=True)

    for direction in ("lr",) if causal else ("both", "lr", "rl"):
        expected = gradients("reference", direction)
        for backend in ("blocked", "sdpa"):
            try:
                found = gradients(backend, direction)
            except UserError:
                assert backend == "sdpa"
                continue
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=3e-6)


@pytest.mark.parametrize("start", [0.0, 5.0])
def test_sums_over_thousands_of_gates_stay_exact(start):
    """A sum of 4,096 logarithms near 0.7 has an error of 2e-4 in float32."""
    torch.manual_seed(1)
    encoding = PositionEncoding("fox", WIDTH, HEADS, 4096, causal=True)
    gate = encoding.encodings["fox"].gate
    torch.nn.init.normal_(gate.weight, std=0.1)
    torch.nn.init.constant_(gate.bias, start)
    query, key, value = torch.randn(3, 1, HEADS, 4096, HEAD_DIM).unbind()
    inputs = torch.randn(1, 4096, WIDTH)
    with torch.no_grad():
        precise = [x.double() for x in (query, key, value)]
        exact = encoding.double().attend(*precise, inputs=inputs.double())
        encoding.float()
        for backend, limit in (("blocked", 5e-5), ("sdpa", 1e-3)):
            ours = encoding.attend(query, key, value, backend=backend, inputs=inputs)
            assert (ours.double() - exact).abs().max() < limit


@pytest.mark.parametrize("backend", ["reference", "blocked", "sdpa"])
def test_autocast_does_not_round_the_sums_of_gates(backend):
    """In bfloat16, a sum of 300 has an error of 1, as much as a gate can forget."""
    encoding, (query, key, value, inputs), _ = draw(True, "fox", length=600, dtype=torch.float32)
    found = []
    with torch.no_grad():
        for autocast in (False, True):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                found.append(encoding.attend(query, key, value, backend=backend, inputs=inputs))
    assert (found[0] - found[1]).abs().max() < 0.05  # gates and attended values are rounded


@pytest.mark.parametrize(
    ("spec", "causal", "message"),
    [
        ("cope", False, "cope is for causal models: it counts back from the query"),
        ("pope+shaw", True, "pope makes queries and keys wider"),
        ("pope+cope", True, "pope makes queries and keys wider"),
        ("pope+rope", True, "pope and rope both act on the rotation"),
    ],
)
def test_refuses_what_has_no_meaning(spec, causal, message):
    with pytest.raises(UserError, match=message):
        PositionEncoding(spec, WIDTH, HEADS, 20, causal)


def test_backends_say_what_they_do_not_serve():
    gates, table = torch.zeros(1, HEADS, 5), torch.zeros(4, HEAD_DIM)
    assert not BACKENDS["reference"].refuses(draft_call(terms_of(counted_table=table)))
    with pytest.raises(UserError, match="counted positions depend on all scores of a query"):
        check("blocked", terms_of(counted_table=table), HEAD_DIM)
    assert flex.refuses(draft_call(terms_of(decay=gates), "meta")) == "it adds no decay to scores"
    with pytest.raises(UserError, match="decay in two directions is not a dot product"):
        check("sdpa", terms_of(decay=(gates, gates)), HEAD_DIM)
    check("sdpa", terms_of(decay=gates), HEAD_DIM)


def test_parameters_in_a_causal_model():
    for name, expected in {"fox": 3 * (24 + 1), "pope": 24, "cope": 64 * 8}.items():
        positions = PositionEncoding(name, 24, 3, 7, causal=True)
        assert sum(positions.parameter_counts().values()) == expected


@pytest.mark.parametrize("backend", ["reference", "blocked", "sdpa", "auto"])
@pytest.mark.parametrize("causal", [True, False])
def test_gates_and_their_gradients_in_float32_are_those_in_float64(backend, causal):
    """Over 600 tokens that forget much: sums of thousands, whose differences count."""
    if backend == "sdpa" and not causal:
        backend = "auto"  # later keys have a decay of their own, which that backend refuses
    torch.manual_seed(0)
    positions = StackPositions("fox", 16, 2, max_positions=600, causal=causal)
    layer = SelfAttention(positions, backend=backend)
    torch.nn.init.normal_(layer.encodings["fox"].gate.weight, std=2.0)
    torch.nn.init.constant_(layer.encodings["fox"].gate.bias, -3.0)
    x = torch.randn(2, 600, 16)
    found: dict[torch.dtype, list[torch.Tensor]] = {}
    for dtype in (torch.float32, torch.float64):
        layer, given = layer.to(dtype), x.to(dtype, copy=True).requires_grad_()
        layer.zero_grad()
        output = layer(*positions(given))[0]
        output.square().mean().backward()
        gates = [parameter.grad.double() for parameter in layer.encodings.parameters()]
        found[dtype] = [output.double(), given.grad.double(), *gates]
    for ours, exact in zip(found[torch.float32], found[torch.float64]):
        allowed = 1e-3 if backend == "sdpa" else 1e-4  # there a sum is a channel of its own
        assert (ours - exact).norm() < allowed * exact.norm()


@pytest.mark.parametrize(
    ("spec", "length"), product_of([*registry.names(), "rope+ssmax", "rope+sink"], [5, 60])
)
def test_nan_stays_nan(spec, length):
    """So that what looks for a training that diverged finds it; nothing is raised before."""
    positions = awake(StackPositions(spec, 16, 2, max_positions=64, causal=True))
    x = torch.randn(1, length, 16)
    x[0, 1, 3] = torch.nan
    assert SelfAttention(positions)(*positions(x))[0][0, 2:].isnan().any()


def test_of_two_decays_both_or_none_have_another_for_later_keys():
    sums = torch.zeros(1, HEADS, LENGTH, 1)
    for first, second in ((Decay(sums), Decay(sums, sums)), (Decay(sums, sums), Decay(sums))):
        with pytest.raises(UserError, match="only one has another for later keys: choose one"):
            first.add(second)
