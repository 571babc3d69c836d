"""Some rounds of the kills: ``make test-trust`` has all of them, at random and at every write."""

from __future__ import annotations

import random

import pytest

from tests.helpers.fault_injection import AT_WRITES, Bench, draw
from tests.helpers.fault_runs import round_of

pytestmark = pytest.mark.slow


def test_a_training_killed_in_a_write_or_out_of_room_goes_on_to_the_same_weights():
    bench = Bench("masked_lm, updates", true=False)
    assert bench.varying == []
    assert {"run/checkpoint_last.pt", "run/checkpoint_best.pt"} <= bench.expected.keys()
    rng = random.Random(1)
    for kind in AT_WRITES:
        number = rng.randint(bench.writes // 3, bench.writes * 2 // 3)  # among the checkpoints
        found = round_of(bench, draw(bench, kind, rng)._replace(number=number), f"slice, {kind}")
        assert found["met"]
        assert found["wrong"] == []
