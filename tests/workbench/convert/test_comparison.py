"""The comparison by which exports and imports check their results."""

from __future__ import annotations

import math

import pytest
import torch

from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.convert.comparison import (
    TOLERANCE,
    compute_scores,
    draw_batches,
    largest_difference,
    refuse_difference,
)
from tests.helpers.exchanged import checkpoint


@pytest.mark.parametrize("family", ["masked_lm", "causal_lm", "translation"])
def test_a_model_is_itself(family):
    model = checkpoint(family, "rope").model
    batches = draw_batches(model)
    assert largest_difference(batches, *[lambda *x: compute_scores(model, *x)] * 2) == 0


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("error", [math.nan, math.inf, 2 * TOLERANCE])
def test_an_error_on_either_side_of_the_padding_is_seen(side, error):
    model = checkpoint("masked_lm", "rope").model
    padding = model.encoder.sentence_encoder.padding_idx

    def compute_ours(tokens):
        return compute_scores(model, tokens)

    def compute_theirs(tokens):
        scores = compute_ours(tokens)
        is_left = bool(tokens[-1, 0] == padding)
        if is_left == (side == "left"):
            scores[0, -1, 0] += error * scores.abs().max()
        return scores

    difference = largest_difference(draw_batches(model), compute_ours, compute_theirs)
    with pytest.raises(UserError, match=r"scores differ by .* of the largest number, and 1e-05 is"):
        refuse_difference("scores differ", difference)


def test_padding_is_not_compared():
    model = checkpoint("masked_lm", "rope").model
    padding = model.encoder.sentence_encoder.padding_idx

    def compute_theirs(tokens):
        scores = compute_scores(model, tokens)
        return scores.masked_fill(tokens.eq(padding)[..., None], torch.nan)

    def compute_ours(tokens):
        return compute_scores(model, tokens)

    assert largest_difference(draw_batches(model), compute_ours, compute_theirs) == 0
