"""What blocked holds for a backward pass: bounded in bytes, nothing under hooks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile

from fairseq_posenc.backends import blocked
from fairseq_posenc.backends.base import AttentionCall
from fairseq_posenc.backends.blocked import geometry
from fairseq_posenc.backends.blocked.dropout import Weigh
from fairseq_posenc.encodings.terms import Terms
from fairseq_posenc.mask import Mask
from tests.backends.test_backends import inputs as small_inputs
from tests.backends.test_backends import make_terms, masks
from tests.helpers.products import product_of, some_of
from tests.helpers.terms import change_terms, terms_of

H, D, LENGTH = 4, 8, 512
NUMBER = 4 * H * LENGTH**2  # bytes of a number for each pair
CHOSEN = ["plain", "bias", "bias by pair", "states", "states and all", "gain", "query table"]
CHOSEN += ["two tables", "product", "product of all", "values per head", "product with reset"]


def forms() -> dict[str, Terms]:
    """Return terms whose blocks hold one, two and three numbers for each pair, in order."""
    table = torch.empty(1, 2 * LENGTH - 1, D).normal_().requires_grad_()
    return {
        "plain": Terms(),
        "gain": terms_of(gain=torch.ones(1, 2 * LENGTH - 1).requires_grad_()),
        "product": terms_of(query_table=table, key_table=table, product=True),
    }


Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # query, key and value


def inputs(batch: int = 1, length: int = LENGTH) -> Inputs:
    query, key, value = (torch.randn(batch, H, length, D, requires_grad=True) for _ in range(3))
    return query, key, value


def find_blocks(out: torch.Tensor) -> Any:
    """Find the node of all blocks in the graph of an output."""
    nodes: list[Any] = [out.grad_fn]
    while type(nodes[-1]).__name__ != "BlocksBackward":
        nodes.append(nodes[-1].next_functions[0][0])
    return nodes[-1]


def held_bytes(call: AttentionCall) -> int:
    """Return the bytes that a call holds for its backward pass."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        kept = blocked.attend(call)
    assert kept[0].requires_grad
    return sum(e.self_cpu_memory_usage for e in seen.events())


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize(("form", "numbers"), [("plain", 1), ("gain", 2), ("product", 3)])
def test_a_call_holds_its_blocks_within_the_budget_and_nothing_beyond(
    form, numbers, dropout, monkeypatch
):
    call = AttentionCall(*inputs(), forms()[form], Mask(), dropout)
    for budget, held in ((numbers * NUMBER, numbers), (numbers * NUMBER - 1, 0)):
        monkeypatch.setattr(blocked, "SAVED_BYTES", budget)
        assert held * NUMBER <= held_bytes(call) <= (held + 0.4) * NUMBER


def test_a_window_does_not_make_a_call_hold_its_blocks(monkeypatch):
    """With one, the blocks of 512 tokens would fit into either budget."""
    limits = Mask(window=64)
    for budget, holds in ((NUMBER, True), (NUMBER - 1, False)):
        monkeypatch.setattr(blocked, "SAVED_BYTES", budget)
        out, _ = blocked.attend(AttentionCall(*inputs(), Terms(), limits))
        assert bool(find_blocks(out).graphs) == holds


def test_the_budget_holds_eleven_sentences_of_roberta_base_and_not_twelve():
    sentence = 4 * 3 * 12 * 512**2  # of a product of three terms
    assert 11 * sentence <= blocked.SAVED_BYTES < 12 * sentence


def test_under_hooks_a_call_holds_no_tensor_beside_the_saved_ones():
    """What else a node had would stay when hooks offload or drop its saved tensors."""
    padding = torch.zeros(1, 64, dtype=torch.bool)
    first = torch.eye(1, 64, dtype=torch.bool)
    terms = terms_of(bias=torch.randn(1, 129, requires_grad=True), reset=first)
    with saved_tensors_hooks(lambda x: x, lambda x: x):
        out, _ = blocked.attend(AttentionCall(*inputs(1, 64), terms, Mask("lr", padding), 0.1))
    node = find_blocks(out)
    assert node.saved_tensors
    assert node.graphs == []
    assert not any(torch.is_tensor(x) for x in vars(node.work).values())


@pytest.fixture
def without_numbers(monkeypatch):
    """Give tensors shapes and no numbers: a call that asks for a number is an error."""
    monkeypatch.setattr(geometry, "PAIRS_PER_THREAD", 2**30)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        yield mode


@pytest.mark.usefixtures("without_numbers")
@pytest.mark.parametrize(
    ("form", "mask"),
    product_of(some_of(CHOSEN, make_terms()), ["lr, padded on the left", "pairs"]),
)
def test_no_call_waits_for_a_gpu(form, mask):
    terms, qkv = make_terms()[form], small_inputs()
    with pytest.raises(DataDependentOutputException):
        qkv[0].sum().item()
    for first in (terms.first, None if terms.first is None else terms.first[:1]):
        given = change_terms(terms, reset=first)
        out, _ = blocked.attend(AttentionCall(*qkv, given, masks()[mask], dropout=0.1))
        assert [x.shape for x in torch.autograd.grad(out.sum(), qkv)] == [x.shape for x in qkv]


def test_no_weight_is_a_denormal_number():
    scores = torch.tensor([0.0, -50.0, -90.0, -100.0]).repeat(1, 1, 2, 1)
    _, kept = Weigh.apply(scores, True, 0.0, None, None, None, torch.ones(1, 1, 4, 8))
    assert kept[0, 0, 0].tolist() == pytest.approx([1.0, 1.9287e-22, 0.0, 0.0], rel=1e-3, abs=0)
