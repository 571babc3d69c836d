"""Exports and imports notice NaN, and errors beside padding, which no mistake in a model makes."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.convert.comparison import (
    TOLERANCE,
    compare_with_transformers,
    refuse_difference,
)
from tests.helpers.exchanged import checkpoint


def copy_of(model, change):
    """Make a model of transformers with the scores of a masked LM, then changed in place."""

    def forward(input_ids, attention_mask):
        scores = model(input_ids)[0]
        change(scores, attention_mask)
        return SimpleNamespace(logits=scores)

    return forward


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("error", [math.nan, math.inf, 2 * TOLERANCE])
def test_an_error_on_either_side_of_the_padding_is_seen(side, error):
    def change(scores, mask):
        if bool(mask[-1, 0]) == (side == "right"):
            scores[0, -1, 0] += error * scores.abs().max()

    model = checkpoint("masked_lm", "rope").model
    difference = compare_with_transformers(model, "masked_lm", copy_of(model, change))
    with pytest.raises(UserError, match=r"scores differ by .* of the largest number, and 1e-05 is"):
        refuse_difference("scores differ", difference)


def test_padding_is_not_compared():
    def change(scores, mask):
        scores[mask == 0] = torch.nan

    model = checkpoint("masked_lm", "rope").model
    assert compare_with_transformers(model, "masked_lm", copy_of(model, change)) == 0
