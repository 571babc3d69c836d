"""The Triton backend's host: what a call launches, where it can run, and what it refuses."""

from __future__ import annotations

import importlib.util
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fairseq_posenc.backends import choose
from fairseq_posenc.backends import triton as backend
from fairseq_posenc.backends.base import AttentionCall
from fairseq_posenc.encodings.runs import Runs
from fairseq_posenc.encodings.terms import Terms
from fairseq_posenc.mask import Mask
from tests.helpers.terms import draft_call, leaves_of, terms_of, terms_of_groups
from tests.helpers.triton_kernels import import_kernels, interpret

attention, problems = import_kernels("attention", "problem")
BATCH, H, LENGTH, D = 8, 12, 2048, 64
H100 = attention.Tile(64, 64, warps=4)
# Operations that only describe a tensor in another way.
VIEWS = {"view", "transpose", "permute", "expand", "detach", "split", "unbind", "slice", "select"}
VIEWS |= {"split_with_sizes", "unsqueeze", "alias", "_unsafe_view", "unflatten"}
ENCODINGS = {
    "none": {},
    "alibi": {"bias": H},
    "t5": {"bias": H},
    "m2": {"gain": 1},
    "shaw": {"query_table": 1},
    "deberta": {"query_table": 1, "key_table": 1},
    "m4m": {"query_table": 1, "shared": True, "product": True},
    "deberta with t5": {"query_table": 1, "key_table": 1, "bias": H},
}


class CountOperations(TorchDispatchMode):
    """Counts the operations of torch, views excepted."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket._qualified_op_name.removeprefix("aten::")
        if name not in VIEWS:
            self.counts[name] += 1
        return function(*args, **(kwargs or {}))


class CountLaunches:
    """Stands for a kernel, and counts its launches."""

    def __init__(self):
        self.count = 0

    def __getitem__(self, grid):
        assert grid[0] > 0
        self.count += 1
        return lambda *args, **options: None


def make_call(form: dict, clipped: bool, direction: str) -> AttentionCall:
    """Return a call of RoBERTa-base's size, without memory."""

    def leaf(*size, dtype=torch.bfloat16):
        return torch.empty(*size, dtype=dtype, device="meta", requires_grad=True)

    query, key, value = (leaf(LENGTH, BATCH, H, D).permute(1, 2, 0, 3) for _ in range(3))
    _, runs = Runs(range(-15, 17), 1 - LENGTH, LENGTH - 1, torch.device("meta")).trim()
    terms = terms_of_groups(form, 2 * LENGTH - 1, D, leaf, runs if clipped else None)
    return AttentionCall(query, key, value, terms, Mask(direction), dropout=0.1)


@pytest.mark.parametrize("direction", ["both", "lr"])
@pytest.mark.parametrize("clipped", [False, True])
@pytest.mark.parametrize("name", ENCODINGS)
def test_a_call_costs_the_host_few_launches_and_operations(name, clipped, direction, monkeypatch):
    """An H100's host took 95 microseconds for a launch and 26 for an operation."""
    interpret(monkeypatch)
    monkeypatch.setattr(attention, "INTERPRETED_TILE", H100)
    launches = CountLaunches()
    for kernel in ("forward_kernel", "backward_kernel", "tokens_kernel", "tables_kernel"):
        monkeypatch.setattr(attention, kernel, launches)
    call = make_call(ENCODINGS[name], clipped, direction)
    if direction != "both":  # all layers share the ranges
        visible = problems.find_visible(call.mask, LENGTH, LENGTH, torch.device("meta"))
        monkeypatch.setattr(problems, "find_visible", lambda *args: visible)
    with CountOperations() as operations:
        attended, _ = backend.attend(call)
        leaves = [*call[:3], *leaves_of(call.terms)]
        torch.autograd.grad(attended, leaves, torch.empty_like(attended))
    assert launches.count <= 7
    assert operations.counts.total() <= 30, operations.counts
    print(f"{name}: {launches.count} launches, {operations.counts.total()} operations")


def test_slabs_have_every_sequence_once_within_their_memory(monkeypatch):
    query, key = torch.zeros(3, H, 20, D), torch.zeros(3, H, 37, D)
    problem = problems.read_call(AttentionCall(query, key, key, Terms()))
    for size in (10**9, 200_000, 20_000, 1):
        monkeypatch.setattr(attention, "MAX_BYTES", size)
        seen = torch.zeros(3 * H)
        for slab in attention.split_slabs(problem, attention.INTERPRETED_TILE, per_pair=2):
            seen[slab.sequence : slab.sequence + slab.sequences] += 1
            assert 4 * 2 * slab.sequences * slab.queries * slab.keys <= size or slab.sequences == 1
        assert seen.eq(1).all()


def test_refuses_what_is_compiled(monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert "torch.compile cannot trace" in backend.refuses(draft_call(device="meta"))


REFUSED = {
    "no matrix product computes a gain": terms_of(channel_gain=torch.ones(1, 5, D)),
    "not a function of their distance": terms_of(pair_bias=torch.ones(1, 1, 3, 3)),
    "states of tokens": terms_of(state_table=torch.ones(1, 5, 2), states=torch.ones(1, H, 3, 2)),
    "do not reset": terms_of(reset=torch.ones(1, 5).bool()),
    "no rows to the values": terms_of(value_table=torch.ones(1, 5, D)),
    "must project the rows first": terms_of(layer_table=torch.ones(1, 5, H * D)),
}


@pytest.mark.parametrize("why", REFUSED)
def test_refuses_what_it_cannot_compute(why):
    assert why in backend.refuses(draft_call(REFUSED[why], "meta"))


def test_refuses_float64_and_wide_heads():
    double = draft_call(device="meta", dtype=torch.float64)
    assert "float32 at most, not in torch.float64" in backend.refuses(double)
    assert "at most 128 wide, not 129" in backend.refuses(draft_call(device="meta", head_dim=129))


def test_refuses_a_cpu_unless_interpreted(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert backend.refuses(draft_call()) == "it runs on a GPU, not on cpu"


def test_says_why_it_cannot_run_here(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert backend.unavailable() == ""
    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert backend.unavailable() == "there is no CUDA device"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert backend.unavailable() == "the GPU is older than compute capability 8.0"
    read_uncached = backend.read_version.__wrapped__
    monkeypatch.setattr(backend, "read_version", lambda: "3.2.0")
    assert backend.unavailable() == "triton is 3.2.0, and 3.6 is the oldest supported"
    monkeypatch.setattr(backend, "read_version", read_uncached)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert backend.unavailable() == "triton is not installed"


TABLE = terms_of(query_table=torch.ones(1, 1023, 64))
CHOICES = {
    "short": (TABLE, 512, "reference", "not triton, not flex"),
    "long": (TABLE, 2048, "blocked", "not triton, not flex"),
    "plain": (Terms(), 2048, "sdpa", "a plain dot product"),
}


@pytest.mark.parametrize("case", CHOICES)
def test_auto_takes_no_kernels_of_ours_on_a_gpu(case, monkeypatch):
    terms, length, name, reason = CHOICES[case]
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # so that it is available
    call = draft_call(terms, "meta", length, length, dtype=torch.bfloat16, dropout=0.1)
    chosen, why = choose("auto", call)
    assert chosen == name
    assert reason in why
