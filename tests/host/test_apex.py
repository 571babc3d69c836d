"""What the page on fairseq says of NVIDIA apex is what fairseq does."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import fairseq
import pytest

from tests.helpers.programs import true_start

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "fairseq.md").read_text(encoding="utf-8")
SECTION = PAGE.split("## NVIDIA apex")[1].split("\n## ")[0]
PACKAGE = Path(fairseq.__file__).parent
BUILT = {"amp_C", "fused_adam_cuda", "xentropy_cuda"}  # modules that apex compiles
# Models of other tasks, and what stands in a comment or only helps with a name of the list.
ELSEWHERE = {"examples", "model_parallel", "models"}
HELPERS = {"apex.multi_tensor_apply.multi_tensor_applier"}


def asked_for() -> set[str]:
    """Collect what fairseq imports of apex, wherever it does."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        if path.relative_to(PACKAGE).parts[0] in ELSEWHERE:
            continue
        text = path.read_text(encoding="utf-8")
        if not re.search("apex|" + "|".join(BUILT), text):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and node.module:
                if node.module.split(".")[0] in {"apex", *BUILT}:
                    found |= {f"{node.module}.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names} & BUILT
            elif isinstance(node, ast.Constant) and node.value in BUILT:
                found.add(node.value)  # importlib.import_module
    return found - HELPERS


def test_the_table_names_all_that_fairseq_takes():
    rows = [line.split(" | ")[0] for line in SECTION.splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`([^`]+)`", row)}
    assert named == asked_for()


# An apex that is installed, with what fairseq builds on.
FAKE = {
    "apex/__init__.py": "",
    "apex/normalization.py": "from torch.nn import LayerNorm as FusedLayerNorm",
    "apex/multi_tensor_apply.py": "class multi_tensor_applier: available = True",
    "apex/optimizers.py": """
class FusedAdam:
    def __init__(self, *args, **kwargs): self.multi_tensor_adam = None
""",
}
BUILD = """
import torch
from fairseq.modules import LayerNorm
from fairseq.modules.layer_norm import has_fused_layernorm
from fairseq.optim.adam import FairseqAdam, FairseqAdamConfig
from fairseq.optim.fused_adam import get_fused_adam_class
for gpu in (False, True):
    torch.cuda.is_available = lambda: gpu
    assert has_fused_layernorm and get_fused_adam_class() is not None
    print(type(LayerNorm(8)).__module__)
    for old in (False, True):
        config = FairseqAdamConfig(tpu=False, lr=[1.0], adam_betas="(0.9, 0.999)", use_old_adam=old)
        weights = [torch.nn.Parameter(torch.zeros(1))]
        print(type(FairseqAdam(config, weights)._optimizer).__module__)
"""
WITHOUT = ["torch.nn.modules.normalization", "fairseq.optim.adam", "fairseq.optim.adam"]
WITH = ["fairseq.modules.layer_norm", "fairseq.optim.fused_adam", "fairseq.optim.adam"]


@pytest.mark.slow
def test_apex_is_taken_where_there_is_a_gpu(tmp_path):
    """In one process: fairseq looks for apex when it is imported, and for a GPU at each call."""
    for name, text in FAKE.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    done = subprocess.run(
        [sys.executable, "-c", BUILD],
        env={**true_start(), "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [*WITHOUT, *WITH]
