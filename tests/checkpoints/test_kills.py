"""Trainings that are killed outright continue to the same weights."""

from __future__ import annotations

import random

import pytest

from tests.helpers.kills import kill_and_finish, run_to_end


@pytest.mark.slow
def test_a_training_killed_at_any_moment_ends_with_the_same_weights(tmp_path):
    (tmp_path / "undisturbed").mkdir()
    (tmp_path / "killed").mkdir()
    expected, seconds = run_to_end("training", tmp_path / "undisturbed")
    assert "checkpoint_last.pt" in expected
    rng = random.Random(1)
    assert kill_and_finish("training", tmp_path / "killed", 3, seconds, rng) == expected
