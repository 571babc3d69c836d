"""What blocked holds for a backward pass: bounded in bytes, seen by hooks on saved tensors.

Tensors have shapes and no numbers (torch's fake tensors): large calls cost nothing, and one that
asks for a number, for which a GPU would have to be waited for, is an error.
"""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from fairseq_posenc.backends import blocked
from fairseq_posenc.backends.base import AttentionCall
from fairseq_posenc.backends.blocked import geometry
from fairseq_posenc.backends.mask import Mask
from fairseq_posenc.encodings.terms import Terms
from tests.backends.test_backends import inputs as small_inputs
from tests.backends.test_backends import make_terms, masks
from tests.helpers.products import product_of

H, D = 12, 64
pytestmark = pytest.mark.usefixtures("without_numbers")


@pytest.fixture
def without_numbers(monkeypatch):
    # One chunk: there is no cache to fit into.
    monkeypatch.setattr(geometry, "PAIRS_PER_THREAD", 2**30)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        yield mode


REST = 8 * 4 * D  # bytes a token and head: query, key, value, output; tables, seeds and masks


def forms(length: int) -> dict[str, Terms]:
    """Return terms whose blocks hold one, two and three numbers for each pair, in order."""
    table = torch.empty(1, 2 * length - 1, D)
    return {
        "plain": Terms(),
        "gain": Terms(gain=torch.empty(1, 2 * length - 1)),
        "product": Terms(query_table=table, key_table=table, product=True),
    }


Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # query, key and value


def saved_bytes(batch: int, length: int, terms: Terms, dropout: float = 0.0) -> int:
    """Return the bytes of all tensors that a call saves, counted by their memory."""
    found: dict[int, int] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        found[x.untyped_storage()._cdata] = x.untyped_storage().nbytes()
        return x

    with saved_tensors_hooks(pack, lambda x: x):
        kept = blocked.attend(AttentionCall(*inputs(batch, length), terms, Mask(), dropout))
    assert kept[0].requires_grad
    return sum(found.values())


def inputs(batch: int, length: int) -> Inputs:
    shape = (batch, H, length, D)
    query, key, value = (torch.empty(shape, requires_grad=True) for _ in range(3))
    return query, key, value


@pytest.mark.parametrize("length", [64, 512, 520])
@pytest.mark.parametrize(
    ("form", "dropout", "numbers"),
    [("plain", 0.0, 1), ("plain", 0.1, 1), ("gain", 0.1, 2), ("product", 0.1, 3)],
)
def test_a_call_within_the_budget_holds_its_blocks(length, form, dropout, numbers):
    found = saved_bytes(1, length, forms(length)[form], dropout)
    padded = -(-length // 64) * 64 if form == "product" else length
    saved = numbers * 4 * H * padded**2
    assert saved <= found <= saved + REST * H * padded


@pytest.mark.parametrize("form", forms(2), ids=lambda name: name)
def test_a_large_batch_holds_no_blocks(form):
    """32 sentences of 512 tokens, of which a product of three terms would hold 1.1 GiB a layer."""
    found = saved_bytes(32, 512, forms(512)[form], dropout=0.1)
    assert found <= 32 * REST * H * 512 < blocked.SAVED_BYTES + 32 * REST * H * 512


def test_the_budget_holds_eight_sentences_of_roberta_base_and_not_nine():
    product = forms(512)["product"]
    saved = 8 * 3 * 4 * H * 512**2
    assert saved <= saved_bytes(8, 512, product) <= saved + 8 * REST * H * 512
    assert saved <= blocked.SAVED_BYTES
    assert saved_bytes(9, 512, product) <= 9 * REST * H * 512


def test_nothing_is_held_where_nothing_is_learnt():
    with torch.no_grad():
        assert blocked.attend(AttentionCall(*inputs(1, 64), Terms(), Mask()))[0].grad_fn is None


def test_a_call_keeps_no_tensor_beside_the_saved_ones():
    """What else a node had would stay when hooks offload or drop its saved tensors."""
    padding = torch.zeros(1, 64, dtype=torch.bool)
    first = torch.eye(1, 64, dtype=torch.bool)
    terms = Terms(bias=torch.empty(1, 129, requires_grad=True), first=first)
    out, _ = blocked.attend(AttentionCall(*inputs(1, 64), terms, Mask("lr", padding), 0.1))
    node = out.grad_fn

    def tensors(x: object) -> list[torch.Tensor]:
        if isinstance(x, torch.Tensor):
            return [x]
        parts = x.values() if isinstance(x, dict) else x if isinstance(x, (tuple, list)) else ()
        return [each for part in parts for each in tensors(part)]

    assert type(node).__name__ == "BlockedAttentionBackward"
    assert node.saved_tensors
    assert tensors(vars(node)) == []


@pytest.mark.parametrize(
    ("form", "mask"), product_of(make_terms(), ["lr, padded on the left", "pairs"])
)
def test_no_call_waits_for_a_gpu(form, mask):
    terms, qkv = make_terms()[form], small_inputs()
    with pytest.raises(DataDependentOutputException):
        qkv[0].sum().item()
    for first in (terms.first, None if terms.first is None else terms.first[:1]):
        given = terms._replace(first=first)
        out, _ = blocked.attend(AttentionCall(*qkv, given, masks()[mask], dropout=0.1))
        grads = torch.autograd.grad(out.sum(), qkv)
        assert [x.shape for x in grads] == [x.shape for x in qkv]
