"""Gradients over ranks, divided heads and shards are those of one process, or refused."""

from __future__ import annotations

import copy
import os
import socket
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, PreTrainedModel

from fairseq_posenc.errors import UserError
from fairseq_posenc.hf import set_positions
from tests.helpers.hf_models import MODELS, Cell, compute_logits, distance, make_inputs

START = "spawn" if torch.cuda.is_available() else "fork"  # faster, but CUDA does not work in forks
# Layers without positions, tables of one stack and of each layer, and a table that was removed.
CELLS = [("llama", "learned+m4m"), ("llama", "3*t5,none"), ("opt", "alibi"), ("opt", "learned")]


def compute_gradients(
    model: torch.nn.Module, inputs: dict[str, Tensor], rows: slice
) -> dict[str, Tensor]:
    model.zero_grad()
    batch = {name: x[rows] for name, x in inputs.items()}
    model(**batch, labels=batch["input_ids"]).loss.backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def run_rank(rank: int, file: str) -> None:
    """Compare gradients of half a batch in each of two processes with those of the whole batch."""
    torch.set_num_threads(1)
    named: Any = {"init_method": f"file://{file}", "timeout": timedelta(seconds=120)}
    dist.init_process_group("gloo", rank=rank, world_size=2, **named)
    for name, spec in CELLS:
        cell = Cell.build(name, spec)
        expected = compute_gradients(copy.deepcopy(cell.model), cell.inputs, slice(None))
        model = DistributedDataParallel(cell.model)
        for _ in range(2):  # DDP finds unused parameters in the second pass
            gradients = compute_gradients(model, cell.inputs, slice(rank, rank + 1))
        assert gradients.keys() == {f"module.{key}" for key in expected}, (name, spec)
        for key, gradient in expected.items():
            torch.testing.assert_close(gradients[f"module.{key}"], gradient, rtol=1e-4, atol=1e-6)
    dist.barrier()
    os._exit(0)  # taking the group down can wait without end for a rank that has ended


@pytest.mark.slow
def test_two_processes_give_the_gradients_of_one(tmp_path: Path) -> None:
    multiprocessing.start_processes(run_rank, (str(tmp_path / "ranks"),), 2, start_method=START)


def run_tensor_parallel(rank: int, folders: dict[str, str], port: int) -> None:
    """Load a model whose heads are divided among two processes."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    inputs = make_inputs(MODELS["llama"])
    for spec, folder in folders.items():
        model = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto")
        assert isinstance(model.model.layers[0].self_attn.q_proj.weight, DTensor)
        if spec == "own":
            assert distance(compute_logits(model, inputs), torch.load(f"{folder}/logits.pt")) < 1e-5
        else:
            with pytest.raises(UserError, match="a layer has 2 of 4 heads"):
                compute_logits(model, inputs)
    dist.barrier()
    os._exit(0)


@pytest.mark.slow
def test_tensor_parallel_models_rotate_or_refuse(tmp_path: Path) -> None:
    folders = {}
    for spec in ("own", "alibi", "t5"):
        cell = Cell.build("llama", spec)
        folders[spec] = str(tmp_path / spec)
        cell.model.save_pretrained(folders[spec])
        torch.save(compute_logits(cell.model, cell.inputs), f"{folders[spec]}/logits.pt")
    with socket.socket() as listener:  # finds a port that is free
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    multiprocessing.start_processes(run_tensor_parallel, (folders, port), 2, start_method=START)


def shard(model: PreTrainedModel, shards_stack: bool) -> PreTrainedModel:
    for layer in model.model.layers:
        fully_shard(layer)
    if shards_stack:
        fully_shard(model.model)
    fully_shard(model)
    return model


@pytest.mark.parametrize("shards_stack", [False, True])
@pytest.mark.parametrize("spec", ["learned+m4m", "t5+alibi+sink", "rope(layout=half)"])
@pytest.mark.usefixtures("_alone")
def test_shards_train_as_the_whole_model(spec: str, shards_stack: bool, tmp_path: Path) -> None:
    cell = Cell.build("llama", spec)
    whole, inputs = copy.deepcopy(cell.model), cell.inputs
    model = shard(cell.model, shards_stack)
    expected = compute_gradients(whole, inputs, slice(None))
    for key, gradient in compute_gradients(model, inputs, slice(None)).items():
        assert isinstance(gradient, DTensor)
        torch.testing.assert_close(gradient.full_tensor(), expected.pop(key))
    assert not expected
    for trained in (model, whole):
        torch.optim.SGD(trained.parameters(), lr=0.1).step()
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=options)
    assert weights.keys() == whole.state_dict().keys()
    model.save_pretrained(tmp_path / "saved", state_dict=weights)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert distance(compute_logits(loaded, inputs), compute_logits(whole, inputs)) < 1e-5
    with pytest.raises(UserError, match="FSDP has sharded this model"):
        set_positions(model, "alibi")


@pytest.mark.usefixtures("_alone")
def test_a_model_that_is_sharded_before_its_weights_are_there() -> None:
    """A model on the device "meta": whatever no checkpoint has would be lost."""
    cell = Cell.build("llama", "rope+learned+m4m")
    expected = compute_logits(cell.model, cell.inputs)
    with torch.device("meta"):
        model = MODELS["llama"].build()
    set_positions(model, "rope+learned+m4m")
    model.to_empty(device="cpu")
    shard(model, True)
    set_model_state_dict(
        model, cell.model.state_dict(), options=StateDictOptions(full_state_dict=True)
    )
    assert distance(compute_logits(model, cell.inputs), expected) < 1e-5
