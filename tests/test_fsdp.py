"""FSDP2: a model that is built without memory, sharded, emptied and loaded is the one it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.commands import run

PROGRAM = """
import sys
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from tests.test_state import Model, tokens
from tests.helpers.formulas import awake

dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
for spec in sys.argv[2:]:
    torch.manual_seed(0)
    built = awake(Model(spec)).eval()
    with torch.device("meta"):
        model = Model(spec)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    options = StateDictOptions(full_state_dict=True, strict=True)
    set_model_state_dict(model, built.state_dict(), options=options)
    given = tokens(60)
    torch.testing.assert_close(model.eval()(*given), built(*given), rtol=0, atol=0)
    model.train()(*given).square().mean().backward()
    print(spec, "equal")
dist.destroy_process_group()
"""
SPECS = ["rope", "xpos", "rope(scaling=yarn:4)", "learned+randomized", "t5", "m4m", "fox"]


@pytest.mark.slow
def test_a_sharded_model_equals_the_one_whose_weights_it_loads(tmp_path):
    done = run("python", "-c", PROGRAM, tmp_path / "store", *SPECS, cwd=Path(__file__).parents[1])
    assert done.out.splitlines() == [f"{spec} equal" for spec in SPECS]
