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


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("error", [0.0, math.nan, math.inf, 2 * TOLERANCE])
def test_an_error_on_either_side_of_the_padding_is_seen_and_none_in_it(side, error):
    def theirs(input_ids, attention_mask):
        scores = model(input_ids)[0]
        if bool(attention_mask[-1, 0]) == (side == "right"):
            scores[0, -1, 0] += error * scores.abs().max()
        scores[attention_mask == 0] = torch.nan
        return SimpleNamespace(logits=scores)

    model = checkpoint("masked_lm", "rope").model
    difference = compare_with_transformers(model, "masked_lm", theirs)
    if not error:
        assert difference == 0
        return
    with pytest.raises(UserError, match=r"scores differ by .* of the largest number, and 1e-05 is"):
        refuse_difference("scores differ", difference)
