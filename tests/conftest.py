"""Fixed seeds, programs that start fast, and Triton's interpreter."""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.helpers import programs
from tests.helpers.fork_server import hasten_hydra, interpret_triton
from tests.helpers.products import WHOLE
from tests.helpers.session_folder import use_session_folder

use_session_folder()
# A shell has what it starts in the background ignore Ctrl-C, which programs would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)
# The programs of both folders find their modules beside them; so do their tests.
sys.path[:0] = [str(Path(__file__).parents[1] / name) for name in ("preprocess", "benchmarks")]
# The programs' server loads the plugin in no command, and it sets this in commands alone.
os.environ["HYDRA_FULL_ERROR"] = "1"
# Tiny tensors: more threads only wait for each other, in the programs that tests start as well.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_configure(config):
    """Have one server of programs for all workers, which alone import what the tests need."""
    if getattr(config.option, "numprocesses", None):
        programs.share(config.option.tx)
        return
    gc.disable()  # until the tests are collected: what is imported stays
    import torch

    from fairseq_posenc.user_dir import register
    from tests.helpers.commands import new_directory

    register()
    hasten_hydra()
    torch.set_num_threads(1)
    interpret_triton()
    # The code that transformers copies out of exports; two workers would write into one file.
    os.environ["HF_MODULES_CACHE"] = str(new_directory())


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers():
    """Have a worker more than there are cores: many tests wait for programs."""
    return len(os.sched_getaffinity(0)) + 1 if hasattr(os, "sched_getaffinity") else None


def pytest_collection_modifyitems(config, items):
    """Leave some to `make matrix`; begin with the files of most slow tests."""
    left = [] if WHOLE else [item for item in items if item.get_closest_marker("matrix")]
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if not item.get_closest_marker("matrix")]
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: -slow[item.path])


def pytest_collection_finish():
    """Leave torch, fairseq and the tests themselves out of all searches for garbage."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Let slow tests start their programs fast."""
    with programs.fast() if item.get_closest_marker("slow") else nullcontext():
        return (yield)


@pytest.fixture
def _alone(tmp_path):
    """Begin a group of this process alone."""
    dist = importlib.import_module("torch.distributed")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rank", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def _seed():
    importlib.import_module("torch").manual_seed(0)
