"""Training on two processes."""

from __future__ import annotations

import socket

import pytest

from commands import EPOCHS, USER_DIR, assert_positions, script, train, trained

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


# fairseq spawns a rank for each GPU that it counts; here the ranks are processes of the CPU.
SPAWNING = """
import torch
from fairseq_cli.train import cli_main
import fairseq_posenc.running.host

if __name__ == "__main__":
    torch.cuda.device_count = lambda: 2
    cli_main()
"""


@pytest.fixture
def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        port: int = taken.getsockname()[1]
    return port


@pytest.mark.parametrize("user_dir", ["fairseq_posenc", USER_DIR], ids=["by_name", "by_path"])
def test_spawned_ranks_find_the_plugin(tmp_path, free_port, user_dir):
    """A new Python for each rank gets the pickled settings; the program has the package already."""
    program = tmp_path / "program.py"
    program.write_text(SPAWNING, encoding="utf-8")
    together = train(
        "masked_lm",
        *("--batch-size", 8, "--max-epoch", 1, "--ddp-backend", "legacy_ddp"),
        *("--distributed-world-size", 2, "--distributed-backend", "gloo"),
        *("--distributed-init-method", f"tcp://localhost:{free_port}"),
        user_dir=user_dir,
        launcher=["python", program],
    )
    assert "training on 2 devices" in together.run.log
    assert together.figures("train", "loss") == pytest.approx(
        trained("masked_lm").figures("train", "loss")[:1], rel=1e-4
    )
