"""``--patience`` counts on where a training is stopped and started again."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.commands import FAMILIES, new_directory, train
from tests.helpers.products import some_of

pytestmark = pytest.mark.slow
# A learning rate that makes each epoch worse than the first.
WORSE = ["--lr", 0.5, "--clip-norm", 0, "--patience", 3, "--optimizer", "sgd"]


@pytest.mark.parametrize("family", some_of(["masked_lm"], FAMILIES))
def test_a_restart_changes_neither_the_end_nor_the_weights(family):
    whole = train(family, *WORSE, "--max-epoch", 30)
    folder = new_directory()
    epochs = _last_epoch(whole)
    assert 3 < epochs < 30, "stopped early"
    for last in (epochs - 1, 30):
        stopped = train(family, *WORSE, "--max-epoch", last, save_dir=folder)
    assert _last_epoch(stopped) == epochs
    weights = [each.checkpoint()["model"] for each in (whole, stopped)]
    torch.testing.assert_close(*weights, rtol=0, atol=0)
    before = (folder / "checkpoint_last.pt").read_bytes()
    again = train(family, *WORSE, "--max-epoch", 30, save_dir=folder)
    assert "the training is finished, and nothing was changed" in again.run.log
    assert (folder / "checkpoint_last.pt").read_bytes() == before


def _last_epoch(training):
    return training.checkpoint()["extra_state"]["train_iterator"]["epoch"]


def test_a_curriculum_ends_also_where_no_restart_ends_it():
    options = ["--curriculum", 1, "--batch-size", 4, "--max-epoch"]
    whole, folder = train("causal_lm", *options, 3), new_directory()
    for last in (2, 3):
        stopped = train("causal_lm", *options, last, save_dir=folder)
    weights = [each.checkpoint()["model"] for each in (whole, stopped)]
    torch.testing.assert_close(*weights, rtol=0, atol=0)


def test_a_larger_patience_goes_on():
    folder = new_directory()
    first = _last_epoch(train("causal_lm", *WORSE, "--max-epoch", 30, save_dir=folder))
    more = [*WORSE, "--patience", 5, "--max-epoch", 30]
    assert _last_epoch(train("causal_lm", *more, save_dir=folder)) > first
