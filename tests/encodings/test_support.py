"""The support table says what runs; every encoding equals its oracle in every place."""

from __future__ import annotations

import pytest

from fairseq_posenc.registry import get
from tests.helpers import parity, support


def test_the_support_table_is_what_runs():
    assert support.PAGE.read_text(encoding="utf-8") == support.page(), "run make docs"


@pytest.mark.parametrize("name", parity.ENCODINGS)
def test_layers_that_differ_windows_and_documents_equal_the_oracle(name, monkeypatch):
    monkeypatch.setattr("fairseq_posenc.backends.planner.SHORT", 0)  # so that `auto` takes blocks
    families = [causal for causal in parity.FAMILIES if causal or not get(name).causal_only]
    for place in parity.PLACES:
        for causal in families:
            assert parity.compare_encoding(name, place, causal) < 1e-5
