"""A score is the sum of what content, position and both give."""

from __future__ import annotations

import pytest
import torch

from fairseq_posenc.analysis.split import split
from fairseq_posenc.mask import Mask
from tests.helpers.formulas import INPUTS, make, our_scores, positions_of, split_heads, their_scores
from tests.helpers.products import some_of
from tests.helpers.tiny_models import COMPOSITIONS, REPRESENTATIVES, encoding_specs

LENGTH = 6
SPECS = [*encoding_specs("scores", "rotation"), *COMPOSITIONS, "m4m+inkling", "none"]


def parts(spec: str, dtype: torch.dtype = torch.float64):
    """Return the split of random scores ``(1, 2, 6, 6)``, what was split, and the encodings."""
    built = make(spec, dtype=dtype)
    query, key = torch.randn(2, 1, 2, LENGTH, 8, dtype=dtype)
    terms = built.terms(positions_of(LENGTH, LENGTH)).projected(split_heads)
    terms |= built.input_terms(INPUTS[None, :LENGTH].to(dtype), positions_of(LENGTH, LENGTH))
    rotation = built.rotation(torch.arange(LENGTH)[None])
    mask = Mask("lr" if "cope" in spec else "both")
    return split(query, key, terms, rotation, mask=mask), query, key, built


@pytest.mark.parametrize("spec", some_of([x for x in REPRESENTATIVES if x in SPECS], SPECS))
def test_models_of_float32_are_split_in_float64(spec):
    found, *_ = parts(spec, torch.float32)
    assert found.scores.dtype == torch.float64
    assert found.scores.isfinite().all()


@pytest.mark.parametrize("spec", SPECS)
def test_the_parts_are_the_score(spec):
    found, query, key, built = parts(spec)
    scores = our_scores(built, query[0], key[0])
    torch.testing.assert_close(found.scores[0], scores, rtol=1e-10, atol=1e-10)
    if found.product:
        ratio = (found.scores - found.position) / torch.stack(list(found.details.values())).prod(0)
        torch.testing.assert_close(ratio, torch.full_like(ratio, ratio.flatten()[0].item()))
    else:
        both = torch.stack([torch.zeros_like(found.both), *found.details.values()]).sum(0)
        torch.testing.assert_close(found.both, both, rtol=1e-10, atol=1e-10)


def test_content_does_not_know_of_positions():
    """Of ``rope`` as well: it is the score of unrotated queries and keys."""
    for spec in ("rope", "m4", "alibi"):
        found, query, key, _ = parts(spec)
        torch.testing.assert_close(found.content, query @ key.transpose(2, 3) * 8**-0.5)


@pytest.mark.parametrize("spec", ["t5", "alibi", "kerple", "tupe", "fire"])
def test_a_bias_is_position_alone(spec):
    found, _, _, built = parts(spec)
    assert found.both.abs().max() < 1e-12
    zero = torch.zeros(2, LENGTH, 8, dtype=torch.float64)
    torch.testing.assert_close(found.position[0], their_scores(built, spec, zero, zero))


def test_states_are_content_and_position():
    found, _, _, built = parts("inkling")
    assert not found.position.any()
    no_content = torch.zeros(2, LENGTH, 8, dtype=torch.float64)
    states = their_scores(built, "inkling", no_content, no_content)
    torch.testing.assert_close(found.details["state_table"][0], states)


@pytest.mark.parametrize("spec", ["m4", "deberta"])
def test_a_table_of_queries_is_shown_from_that_of_keys(spec):
    found, query, key, built = parts(spec)
    without_key = their_scores(built, spec, query[0], torch.zeros_like(key[0]))
    torch.testing.assert_close(found.details["query_table"][0], without_key)
    without_query = their_scores(built, spec, torch.zeros_like(query[0]), key[0])
    torch.testing.assert_close(found.details["key_table"][0], without_query)
