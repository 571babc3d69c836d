"""The equation equals a loop over pairs, and a mask its definition."""

from __future__ import annotations

import math

import pytest
import torch

from fairseq_posenc.backends import equation
from fairseq_posenc.backends.mask import DIRECTIONS, Mask
from fairseq_posenc.encodings.locality import Locality

M, W = 3, 4


def numbers(*size: int) -> torch.Tensor:
    return torch.randn(1, 1, *size, dtype=torch.float64)


@pytest.mark.parametrize("product", [False, True])
def test_a_score_is_the_formula_of_its_pair(product):
    content, query_rows, key_rows, gain, bias = (numbers(M, W) for _ in range(5))
    temperature, scale, cap = numbers(M, 1), 0.3, 2.0
    found = equation.score(
        content,
        [query_rows, key_rows],
        product=product,
        gain=gain,
        scale=scale,
        biases=[bias],
        temperature=temperature,
        softcap=cap,
    )
    for i in range(M):
        for j in range(W):
            at = (0, 0, i, j)
            parts = [float(gain[at] * content[at]), float(query_rows[at]), float(key_rows[at])]
            combined = math.prod(parts) if product else sum(parts)
            score = float(temperature[0, 0, i, 0]) * (scale * combined + float(bias[at]))
            assert float(found[at]) == pytest.approx(cap * math.tanh(score / cap), rel=1e-12)


def test_a_softmax_hides_keys_and_drops_the_weight_of_a_sink():
    scores, sink = numbers(M, W), torch.tensor([0.7], dtype=torch.float64)
    hidden = torch.zeros(M, W, dtype=torch.bool)
    hidden[0, 1] = hidden[1] = True
    weights = equation.softmax(scores, hidden, sink)[0, 0]
    for i in range(M):
        seen = [float(scores[0, 0, i, j].exp()) * (not hidden[i, j]) for j in range(W)]
        expected = [x / (sum(seen) + math.exp(0.7)) for x in seen]
        assert weights[i].tolist() == pytest.approx(expected, rel=1e-12)


def test_counted_positions_are_interpolated_rows():
    """Gates of 1 and 1/2: key 0 is at 1.5, key 1 at 0.5, and hidden keys are not counted."""
    table = torch.tensor([[1.0], [3.0], [7.0]])
    query = torch.ones(1, 1, 1, 1)
    content = torch.tensor([[100.0, 0.0, 5.0]])[None, None]
    hidden = torch.tensor([[False, False, True]])
    counted = equation.attend_counted(query, table, content, hidden)
    torch.testing.assert_close(counted[0, 0, 0], torch.tensor([5.0, 2.0, 1.0]))


def test_sums_are_subtracted_part_by_part():
    large = torch.tensor([1e8, 1e8 + 64])[None, None]
    parts = torch.stack([large, torch.tensor([[[0.25, 0.5]]])], -1)
    differences = equation.subtract_sums(parts, parts)[0, 0]
    torch.testing.assert_close(differences, torch.tensor([[0.0, -64.25], [64.25, 0.0]]))


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("tgt_len", [9, 4])
def test_a_mask_is_its_definition_for_each_pair(direction, tgt_len):
    src_len = 9
    padding = torch.zeros(2, src_len, dtype=torch.bool)
    padding[0, :2] = padding[1, 7:] = True
    segments = torch.arange(src_len).expand(2, -1) // torch.tensor([[3], [4]])
    first_keys = torch.arange(src_len)[None] == 1
    pairs = torch.rand(tgt_len, src_len) < 0.3
    for locality in (
        Locality(),
        Locality(window=3),
        Locality(window=3, first_keys=first_keys),
        Locality(window=5, segments=segments, first_keys=first_keys),
    ):
        for mask in (
            Mask(direction, locality=locality),
            Mask(direction, padding, pairs, locality=locality),
        ):
            forbidden = mask.forbidden(tgt_len, src_len, padding.device)
            queries = torch.arange(src_len - tgt_len, src_len)
            defined = mask.hides(queries[None, :, None], torch.arange(src_len)[None, None])
            if forbidden is None:
                assert not defined.any()
                continue
            assert torch.equal(
                defined.expand(2, -1, -1), forbidden[:, 0].expand(2, tgt_len, src_len)
            )
