"""The public interface: it gives the same numbers as the models."""

from __future__ import annotations

import pytest
import torch

from fairseq_posenc.api import PositionEncoding
from fairseq_posenc.errors import UserError
from tests.helpers import oracles
from tests.helpers.formulas import IN_FLOAT32, awake, oracle_options, oracle_params, padding_of
from tests.helpers.products import some_of
from tests.helpers.tiny_models import encoding_specs, needs_causal

SPECS = ["none", "learned+m4m", "rope+shaw", *encoding_specs("scores", "rotation")]


def make(spec: str) -> PositionEncoding:
    return awake(PositionEncoding(spec, 16, 2, max_positions=20, causal=needs_causal(spec)))


@pytest.mark.parametrize("spec", some_of([spec for spec in SPECS if "(" not in spec], SPECS))
def test_scores_have_their_shape_and_padding_changes_none(spec):
    encoding = make(spec).double()
    query, key = torch.randn(2, 2, 2, 18, 8, dtype=torch.float64)
    scores = encoding.scores(query, key, padding_of(18, 0, 1))
    assert scores.shape == (2, 2, 18, 18)
    alone = encoding.scores(query[1:, :, 1:], key[1:, :, 1:])
    torch.testing.assert_close(scores[1:, :, 1:, 1:], alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["m4m", "tupe", "t5", "alibi"])
def test_scores_equal_the_formula(name):
    encoding = make(name).double()
    query, key = torch.randn(2, 2, 17, 8, dtype=torch.float64)
    built = encoding.shared if name in encoding.shared else encoding.encodings
    (item,) = encoding.spec.items
    options = oracle_options(item, encoding.dims)
    theirs = oracles.SCORES[name](query, key, oracle_params(built, name), options)
    tolerance = 1e-5 if name in IN_FLOAT32 else 1e-12
    ours = encoding.scores(query[None], key[None])[0]
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def test_parameters_are_counted_by_name():
    counts = make("learned+m4m").parameter_counts()
    assert counts == {"input.learned.table.weight": 20 * 16, "encodings.m4m.table.weight": 39 * 8}


def test_input_vectors_are_added():
    encoding = make("learned")
    embeddings = torch.randn(2, 4, 16)
    added = encoding(embeddings)[0] - embeddings
    torch.testing.assert_close(added, encoding.input["learned"].table.weight[:4].expand(2, -1, -1))


@pytest.mark.parametrize("spec", some_of([spec for spec in SPECS if "(" not in spec], SPECS))
def test_distance_curves_are_finite_and_repeatable(spec):
    encoding = make(spec)
    curve = encoding.distance_curve(3)
    assert curve.shape == (2, 7)
    assert curve.isfinite().all()
    torch.testing.assert_close(curve, encoding.distance_curve(3))


def test_a_bias_alone_shows_in_its_curve():
    curve = PositionEncoding("alibi", 16, 2, causal=True).distance_curve(3)
    flat = PositionEncoding("none", 16, 2, causal=True).distance_curve(3)
    expected = torch.tensor([3.0, 2.0, 1.0, 0.0, 1.0, 2.0, 3.0])
    torch.testing.assert_close(curve, flat - torch.tensor([[2.0**-4], [2.0**-8]]) * expected)


def test_attended_values_are_means_of_what_a_causal_query_sees():
    zeros, values = torch.zeros(1, 2, 4, 8), torch.randn(1, 2, 4, 8)
    attended = PositionEncoding("none", 16, 2, causal=True).attend(zeros, zeros, values)
    torch.testing.assert_close(attended, values.cumsum(2) / torch.arange(1, 5)[:, None])


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(UserError, match=r"must both be \(batch, 2 heads, length, 8\)"):
        make("m4").scores(torch.zeros(1, 4, 5, 8), torch.zeros(1, 4, 5, 8))
    query, key = torch.zeros(2, 2, 2, 5, 8)
    with pytest.raises(UserError, match=r"inputs \(2, 4, 16\) must be \(2, 5, 16\)"):
        make("deberta_v2").scores(query, key, inputs=torch.zeros(2, 4, 16))


@pytest.mark.parametrize("spec", ["learned+m4m", "rope+shaw", "tupe", "deberta_v2", "t5"])
def test_everything_is_made_where_the_inputs_are(spec):
    """On the device "meta" a tensor from the CPU is an error."""
    encoding = make(spec).to("meta")
    query, key = torch.zeros(2, 2, 2, 5, 8, device="meta")
    padding = torch.zeros(2, 5, dtype=torch.bool, device="meta")
    assert encoding(torch.zeros(2, 5, 16, device="meta"), padding)[0].is_meta
    assert encoding.scores(query, key, padding).is_meta
    assert encoding.distance_curve(3).is_meta
