"""Only what is named differs between classes of transformers and the models here."""

from __future__ import annotations

import pytest
import transformers

from tests.helpers.hf_neighbours import RELATIVES, compared

pytestmark = pytest.mark.skipif(
    not transformers.__version__.startswith("4."), reason="written for transformers 4"
)


@pytest.mark.parametrize("name", RELATIVES)
def test_with_the_parts_that_differ_replaced_the_scores_are_equal(name):
    first, steps = compared(RELATIVES[name])
    differences = [first] + [left for _, left in steps]
    *others, last = differences
    assert last < 1e-5
    assert all(left > 1e-5 for left in others)
