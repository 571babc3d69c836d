"""What no checkpoint carries, and what layers share: nothing is lost and nothing counts twice."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from fairseq_posenc import torch_modes
from fairseq_posenc.api import SelfAttention, StackPositions
from fairseq_posenc.errors import UserError
from tests.helpers import tiny_models
from tests.helpers.formulas import awake, padding_of
from tests.helpers.products import product_of, some_of

SCALINGS = [
    *("linear:4", "ntk:4", "dynamic:2", "yarn:4", "llama3:8", "proportional:1:part=0.5"),
    "longrope:4:short=1/1.1/1.2/1.3:long=1/2/3/4",
]
COMPANIONS = [
    *(f"rope+{name}" for name in tiny_models.COMPANIONS),
    *("learned+randomized", "alibi+randomized", "rope+randomized(evaluation=even)"),
    *("rope+window(size=4)", "rope+chunk(size=4)", "3*rope+window(size=4),none+logn(length=8)"),
]
ALL = [
    *tiny_models.encoding_specs("input", "rotation", "scores", "values"),
    *(f"rope(scaling={scaling})" for scaling in SCALINGS),
    *(f"xpos(scaling={scaling})" for scaling in SCALINGS[:4]),
    *dict.fromkeys([*COMPANIONS, *tiny_models.COMPOSITIONS, *tiny_models.PATTERNS]),
]


# Options change an encoding's numbers, and seldom how they are computed.
FEWER = some_of([spec for spec in ALL if "(" not in spec or "+" in spec or "," in spec], ALL)


class Model(nn.Module):
    """Two layers of attention; ``checkpointing`` is None, or what `use_reentrant` says."""

    checkpointing: bool | None = None

    def __init__(self, spec: str, backend: str = "auto") -> None:
        super().__init__()
        causal = tiny_models.needs_causal(spec) or "rope+ssmax" in spec
        self.positions = StackPositions(spec, 16, 2, max_positions=64, causal=causal)
        layers = (SelfAttention(self.positions, backend=backend, layer=n) for n in range(2))
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor, padding: torch.Tensor | None = None) -> torch.Tensor:
        documents = None
        if "documents" in str(self.positions.spec):
            documents = torch.arange(x.size(1)).div(5, rounding_mode="floor").expand(x.shape[:2])
        x, shared = self.positions(x, padding, document_ids=documents)
        again = self.checkpointing
        for layer in self.layers:
            run = layer if again is None else partial(checkpoint, layer, use_reentrant=again)
            x = x + run(x, shared)[0]
        return x


def tokens(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(length)
    return torch.randn(2, length, 16, generator=generator), padding_of(length, 2, -3)


@pytest.mark.parametrize("spec", FEWER)
def test_a_model_built_without_memory_equals_the_one_whose_weights_it_loads(spec):
    torch.manual_seed(0)
    built = awake(Model(spec)).eval()
    with torch.device("meta"):
        emptied = Model(spec).eval()
    emptied.to_empty(device="cpu")
    for tensor in (*emptied.parameters(), *emptied.buffers()):
        with torch.no_grad():
            tensor.fill_(7 if tensor.dtype == torch.bool else 77)
    emptied.load_state_dict(built.state_dict(), strict=True)
    for length in (5, 60):
        torch.testing.assert_close(emptied(*tokens(length)), built(*tokens(length)), rtol=0, atol=0)


@pytest.mark.parametrize("spec", ["rope", "xpos", "rope(scaling=yarn:4)", "learned+randomized"])
def test_copies_types_and_default_types_change_no_constant(spec):
    torch.manual_seed(0)
    built = awake(Model(spec)).eval()
    given = tokens(60)
    for changed in (copy.deepcopy(built), copy.deepcopy(built).half().float()):
        changed.load_state_dict(built.state_dict())
        torch.testing.assert_close(changed(*given), built(*given), rtol=0, atol=0)


def test_frequencies_are_exact_far_out():
    """Rotations at position 2^20 are those of frequencies in float32, rounded once."""
    encoding = StackPositions("rope(layout=half)", 128, 1).shared.as_list()[0]
    exponents = torch.arange(0, 128, 2, dtype=torch.float32) / 128
    ids = torch.tensor([[1, 2**10, 2**20]])
    expected = ids[0, :, None] * 10000.0**-exponents
    phases = encoding.rotation(ids).phases[0, 0]
    torch.testing.assert_close(phases, torch.polar(torch.ones_like(expected), expected))


def gradients(model: Model, length: int) -> dict[str, torch.Tensor]:
    x, padding = tokens(length)
    torch.manual_seed(3)
    model.zero_grad()
    x = x.double().requires_grad_()
    (model(x, padding)[~padding] ** 2).mean().backward()
    named = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert x.grad is not None
    return {**named, "x": x.grad}


@pytest.mark.parametrize(
    ("spec", "reentrant", "length"), product_of(FEWER, [True, False], [20, 60])
)
def test_layers_that_are_run_again_give_the_same_gradients(spec, reentrant, length):
    torch.manual_seed(0)
    model = awake(Model(spec)).double().train()
    for layer in model.layers:
        layer.dropout = 0.1
    expected = gradients(model, length)
    model.checkpointing = reentrant
    again = gradients(model, length)
    assert again.keys() == expected.keys()
    torch.testing.assert_close(again, expected)


class Watch(TorchDispatchMode):
    """Collects the operations whose results are in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and x.dtype in (torch.float64, torch.complex128):
                self.found.add(str(func))
        return result


@pytest.mark.parametrize(("spec", "length"), product_of(FEWER, [1, 20, 60]))
def test_nothing_is_computed_in_float64(spec, length):
    """Devices such as Apple's have no float64."""
    with Watch() as watch:
        model = awake(Model(spec)).train()
        model(*tokens(length)).square().mean().backward()
        with torch.no_grad():
            model.eval()(*tokens(length))
    assert not watch.found


@pytest.mark.parametrize(
    ("spec", "default"), product_of(FEWER, [torch.float64, torch.bfloat16, torch.float16])
)
def test_the_default_type_changes_nothing(spec, default):
    torch.manual_seed(0)
    built = awake(Model(spec)).eval()
    given = tokens(60)
    expected = built(*given)
    torch.set_default_dtype(default)
    try:
        again = Model(spec).float().eval()
        again.load_state_dict(built.state_dict())
        torch.testing.assert_close(again(*given), expected)
    finally:
        torch.set_default_dtype(torch.float32)


def outcome(compute: Callable[[], Any]) -> Any:
    """Return what a function returns, or the message of its error."""
    try:
        return compute()
    except (UserError, RuntimeError) as error:
        return str(error)


@pytest.mark.parametrize("length", [6, 60])
@pytest.mark.parametrize(
    ("spec", "backend"),
    [
        (spec, backend)
        for spec in ("none", "t5", "alibi", "shaw", "m3", "m4m", "tupe_shared", "cope", "pope+fox")
        for backend in ("auto", "reference", "blocked")
        if backend != "blocked" or spec not in ("m3", "cope")  # which it does not serve
    ],
)
def test_second_order_gradients_are_right_or_refused(spec, backend, length):
    torch.manual_seed(0)
    model = awake(Model(spec, backend)).double()
    exact = awake(Model(spec, "reference")).double()
    exact.load_state_dict(model.state_dict())
    x, v = (torch.randn(1, length, 16, dtype=torch.float64) for _ in range(2))

    def loss(module: Model):
        return lambda given: (module(given) ** 3).mean()

    def gradient(given: torch.Tensor) -> torch.Tensor:
        given = given.detach().requires_grad_()
        return torch.autograd.grad(loss(exact)(given), given)[0]

    step = 1e-6
    expected = (gradient(x + step * v) - gradient(x - step * v)) / (2 * step)

    product = outcome(lambda: torch.autograd.functional.hvp(loss(model), x, v)[1])
    if isinstance(product, torch.Tensor):
        assert (product - expected).norm() < 1e-4 * expected.norm()
        return
    assert backend != "reference"
    assert "second-order" in product or "derivative for" in product
    given = x.detach().requires_grad_()

    def differentiate_twice() -> None:
        (first,) = torch.autograd.grad(loss(model)(given), given, create_graph=True)
        first.square().sum().backward()

    def pass_backward_twice() -> None:
        loss(model)(given).backward(create_graph=True)
        assert given.grad is not None
        given.grad.square().sum().backward()

    assert isinstance(outcome(differentiate_twice), str)
    assert isinstance(outcome(pass_backward_twice), str)


@pytest.mark.parametrize("operation", ["bmm", "mm", "addmm", "_softmax", "baddbmm"])
@pytest.mark.parametrize("spec", ["none", "t5", "shaw", "shaw_values", "m4m", "deberta_v2", "fox"])
def test_selective_checkpointing_gives_the_same_gradients(spec, operation):
    """What is kept of a first pass must not be changed in place: a right value, or an error."""
    torch.manual_seed(0)
    positions = awake(StackPositions(spec, 16, 2, max_positions=64, causal=True))
    layer = awake(SelfAttention(positions, dropout=0.1)).train()
    x, kept = torch.randn(2, 60, 16), [getattr(torch.ops.aten, operation).default]
    found = []
    contexts = partial(create_selective_checkpoint_contexts, kept)
    for run in (layer, partial(checkpoint, layer, use_reentrant=False, context_fn=contexts)):
        torch.manual_seed(1)
        layer.zero_grad()
        given = x.clone().requires_grad_()
        embedded, shared = positions(given)
        output, _ = run(embedded, shared)
        output.square().sum().backward()
        found.append([given.grad, *(p.grad for p in layer.parameters() if p.grad is not None)])
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("spec", ["t5", "rope+t5", "deberta_v2", "tupe_shared", "t5+fox"])
def test_checkpointing_takes_hooks_of_others_and_ones_it_cannot_find(spec, monkeypatch):
    torch.manual_seed(0)
    model = awake(Model(spec)).double().train()
    expected = gradients(model, 60)
    model.checkpointing = True
    with torch.autograd.graph.save_on_cpu():
        again = gradients(model, 60)
    torch.testing.assert_close(again, expected)
    monkeypatch.setattr(torch_modes, "_find_hooks", lambda _: ())  # as with torch before 2.8
    model.checkpointing = False
    torch.testing.assert_close(gradients(model, 60), expected)
