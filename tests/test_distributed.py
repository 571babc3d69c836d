"""Training on two processes."""

from __future__ import annotations

import pytest

from commands import EPOCHS, assert_positions, script, train, trained

pytestmark = pytest.mark.slow
# fairseq finds out about ranks by itself only where there are GPUs.
RANK = 'exec "$0" "$@" --distributed-rank "$RANK"'
TORCHRUN = ["torchrun", "--standalone", "--nproc_per_node=2", "--no-python", "sh", "-c", RANK]
DISTRIBUTED = [
    *("--distributed-world-size", 2, "--distributed-no-spawn"),
    *("--distributed-init-method", "env://", "--distributed-backend", "gloo"),
    *("--ddp-backend", "legacy_ddp"),  # the default asks for a GPU
]


def test_two_ranks_give_the_loss_of_one_with_the_double_batch():
    """The masked LM has a table in each layer, whose gradients must be shared, too."""
    alone = trained("masked_lm")
    together = train(
        "masked_lm",
        *("--batch-size", 8, "--max-epoch", EPOCHS, *DISTRIBUTED),
        launcher=[*TORCHRUN, script("fairseq-train")],
    )
    assert_positions(together.run, "masked_lm")
    assert "training on 2 devices" in together.run.log
    for key in ("loss", "gnorm"):
        expected = alone.figures("train", key)
        assert together.figures("train", key) == pytest.approx(expected, rel=1e-4)
