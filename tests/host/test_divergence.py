"""A training whose numbers explode stops with a line that says at which update."""

from __future__ import annotations

import re

import pytest
import torch

from tests.helpers.commands import new_directory, train

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("family", ["causal_lm", "translation"])
def test_the_line_names_the_update_and_the_checkpoints_are_kept(family):
    save_dir = new_directory()
    train(family, "--max-update", 1, save_dir=save_dir)
    before = torch.load(save_dir / "checkpoint_last.pt")["model"]
    options = ("--max-update", 9, "--lr", 1e30, "--reset-lr-scheduler", "--save-interval", 99)
    done = train(family, *options, save_dir=save_dir, fails=True).run
    assert done.status == 1
    assert re.search(r"training stopped at update [23]: gradients are Nan/Inf", done.err)
    after = torch.load(save_dir / "checkpoint_last.pt")["model"]
    torch.testing.assert_close(after, before, rtol=0, atol=0)
