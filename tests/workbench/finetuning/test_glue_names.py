"""Models in one folder have names, and so output folders, of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from fairseq_posenc.workbench.finetuning.glue.command import _name_model


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("runs/m4m/checkpoint_best.pt", "m4m"),
        ("runs/m4m/checkpoint_last.pt", "m4m-checkpoint_last"),
        ("models/a.pt", "models-a"),
        ("models/b.pt", "models-b"),
    ],
)
def test_name(path, name):
    assert _name_model(Path(path)) == name
