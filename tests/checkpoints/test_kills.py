"""A training that is killed outright continues to the same weights.

At whatever moment: other tests kill where a checkpoint is about to be written.
"""

from __future__ import annotations

import random

import pytest

from tests.helpers.kills import kill_and_finish, run_to_end


@pytest.mark.slow
def test_a_training_killed_at_any_moment_ends_with_the_same_weights(tmp_path):
    (tmp_path / "undisturbed").mkdir()
    (tmp_path / "killed").mkdir()
    expected, changes = run_to_end(tmp_path / "undisturbed")
    assert "checkpoint_last.pt" in expected
    found = kill_and_finish(tmp_path / "killed", 1, changes, random.Random(1))
    assert [name for name in expected | found if expected.get(name) != found.get(name)] == []
