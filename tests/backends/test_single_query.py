"""A single query, as in a step of decoding, equals the last row of many queries."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fairseq_posenc.backends import BACKENDS
from fairseq_posenc.backends.base import AttentionCall
from fairseq_posenc.encodings.term import ByDistance, Term
from fairseq_posenc.encodings.terms import Terms
from fairseq_posenc.mask import Mask
from tests.backends.test_backends import ROWS, B, D, H, T, inputs, make_terms, masks
from tests.helpers.terms import leaves_of, terms_of


def forms() -> dict[str, Terms]:
    """Return terms of every form, those included that blocks cannot serve."""

    def channels(groups: int, more: int = 0) -> torch.Tensor:
        return torch.randn(groups, ROWS + more, D, dtype=torch.float64, requires_grad=True)

    first = make_terms()["all with reset"].first
    row = torch.randn(H, 1, D, dtype=torch.float64, requires_grad=True)
    return {
        **make_terms(dtype=torch.float64),
        "gain of channels": terms_of(channel_gain=channels(1)),
        "gain of channels per head with reset": terms_of(channel_gain=channels(H, 2), reset=first),
        "one row for all distances": terms_of(
            query_table=channels(1), key_table=row.expand(-1, ROWS, -1), scale_factor=2.0
        ),
    }


def of_last_query(terms: Terms) -> Terms:
    """Return the terms of the last query: the rows up to distance 0, and those of the reset."""

    def cut(term: Term) -> Term:
        if not isinstance(term, ByDistance):
            return term.map_axis("T", lambda x, dim: x.narrow(dim, x.size(dim) - 1, 1))
        up_to_here = term.table[:, :T]  # keeps the stride of a row that is all rows
        if terms.first is not None:
            up_to_here = torch.cat([up_to_here, term.table[:, ROWS:]], dim=1)
        return replace(term, table=up_to_here)

    return Terms([cut(term) for term in terms])


@pytest.mark.parametrize("mask", ["lr", "lr, padded on the left", "both, padded on the right"])
@pytest.mark.parametrize("form", forms(), ids=lambda name: name)
def test_equals_the_last_of_many_queries(form, mask):
    terms, mask = forms()[form], masks()[mask]
    attend = BACKENDS["reference"].attend
    qkv = inputs(torch.float64)
    many, _ = attend(AttentionCall(*qkv, terms, mask))
    one, _ = attend(AttentionCall(qkv[0][:, :, -1:], *qkv[1:], of_last_query(terms), mask))
    torch.testing.assert_close(one, many[:, :, -1:], rtol=1e-9, atol=1e-9)
    weight, leaves = torch.randn_like(one), [*qkv, *leaves_of(terms)]
    for leaf, our, their in zip(
        leaves,
        torch.autograd.grad((one * weight).sum(), leaves, materialize_grads=True),
        torch.autograd.grad((many[:, :, -1:] * weight).sum(), leaves, materialize_grads=True),
    ):
        if leaf.stride(1) == 0:  # one row, whichever of its places the gradient is given to
            our, their = our.sum(1), their.sum(1)
        torch.testing.assert_close(our, their, rtol=1e-8, atol=1e-8)


def test_the_attention_weights_of_one_query_sum_to_one():
    qkv = inputs(torch.float64)
    terms = of_last_query(forms()["all with reset"])
    call = AttentionCall(qkv[0][:, :, -1:], *qkv[1:], terms, Mask("lr"), need_weights=True)
    _, weights = BACKENDS["reference"].attend(call)
    assert weights.shape == (B, H, 1, T)
    torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights.sum(-1)))
