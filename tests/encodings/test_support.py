"""The support table says what runs; every encoding equals its oracle in every place."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
from torch.nn.attention.flex_attention import flex_attention

from fairseq_posenc.backends import flex
from fairseq_posenc.errors import UserError
from fairseq_posenc.registry import get
from tests.encodings.test_second_oracles import CASES
from tests.helpers import parity, support
from tests.helpers.formulas import IN_FLOAT32
from tests.helpers.products import product_of, some_of


def test_the_support_table_is_what_runs():
    assert support.PAGE.read_text(encoding="utf-8") == support.page(), "run make docs"


@pytest.mark.parametrize(
    ("name", "place"), product_of(some_of(parity.ENCODINGS[::2], parity.ENCODINGS), parity.PLACES)
)
def test_layers_that_differ_windows_and_documents_equal_the_oracle(name, place, monkeypatch):
    monkeypatch.setattr("fairseq_posenc.backends.planner.SHORT", 0)  # so that `auto` takes blocks
    bound = 1e-5 if name in IN_FLOAT32 else 1e-9
    assert parity.compare_translation(name, place) < bound
    assert parity.compare_encoding(name, place, causal=True) < bound
    if not get(name).causal_reason:
        assert parity.compare_encoding(name, place, causal=False) < bound


CAUSAL = [case for case in CASES if True in case.causal]


@pytest.mark.parametrize("case", some_of(CAUSAL[::2], CAUSAL), ids=lambda case: case.spec)
def test_translation_models_equal_the_second_formulas(case):
    for backend in case.backends:
        assert parity.compare_feature(case, "translation", backend) < case.tolerance


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.spec}-{case.causal[0]}")
def test_flex_in_float32_equals_the_second_formulas(case, monkeypatch):
    monkeypatch.setattr(flex, "_compile_attention", lambda: flex_attention)
    refused = "sink" in case.spec or "cope" in case.spec
    for family in ("causal", *some_of([], ["translation"])) if case.causal[0] else ("encoder",):
        with pytest.raises(UserError) if refused else nullcontext():
            assert parity.compare_feature(case, family, "flex") < 3e-5
