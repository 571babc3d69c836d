"""The library without fairseq: it is light, alone, and does what its pages show."""

from __future__ import annotations

import contextlib
import doctest
import importlib
import importlib.metadata
import io
import json
import pydoc_data.topics
import re
from pathlib import Path

import matplotlib
import pytest
import torch

import fairseq_posenc
from fairseq_posenc.api import Cache
from fairseq_posenc.errors import how_to_install
from tests.helpers.commands import run
from tests.helpers.products import some_of

ROOT = Path(fairseq_posenc.__file__).resolve().parents[1]
# A layer that attends, and what commands say, where torch and numpy are alone.
ALONE = """
import sys
sys.path[:] = [path for path in sys.path if "site-packages" not in path] + sys.argv[1:]
import torch
from fairseq_posenc.api import SelfAttention, StackPositions
try:
    import fairseq
except ImportError:
    pass
else:
    raise SystemExit("fairseq is found")
positions = StackPositions("learned+m4m+reset", 16, 2, causal=True)
x, shared = positions(torch.randn(2, 5, 16))
print(SelfAttention(positions)(x, shared)[0].shape)
from fairseq_posenc.workbench.cli import main
commands = ("list", "describe m4m", "count --encoding m4m", "doctor")
commands += ("compare --text x.txt", "learning-curves x.log")
commands += ("swap --checkpoint . --out new --position-encoding rope",)
codes = [main(command.split()) for command in commands]
from fairseq_posenc.user_dir import register
try:
    register()
except ValueError as error:
    print(codes, error)
"""


def needed(name: str, found: set[str]) -> set[str]:
    """Return the distributions that one needs, itself among them."""
    try:
        requirements = importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:
        return found
    found.add(name)
    for line in requirements:
        (other,) = re.findall(r"^[\w.-]+", line)
        if "extra ==" not in line and other not in found:
            needed(other, found)
    return found


@pytest.fixture
def torch_alone(tmp_path):
    """Return a folder with torch and numpy, and with what they need."""
    site = Path(torch.__file__).parents[1]
    for name in needed("torch", needed("numpy", set())):
        for top in {file.parts[0] for file in importlib.metadata.files(name) or ()} - {".."}:
            if (site / top).exists() and not (tmp_path / top).exists():
                (tmp_path / top).symlink_to(site / top)
    (tmp_path / "config.json").touch()  # as in a folder of transformers
    return tmp_path


def test_it_works_with_torch_and_numpy_alone_and_what_needs_more_says_so_in_a_line(torch_alone):
    done = run("python", "-I", "-c", ALONE, torch_alone, ROOT, cwd=torch_alone)
    assert done.out.startswith("torch.Size([2, 5, 16])\n")
    *_, last = done.out.splitlines()
    assert "without build isolation" in (hint := how_to_install("fairseq"))
    assert last == f"[0, 0, 0, 0, 2, 2, 2] needs fairseq: {hint}", done.err
    of_compare, of_curves, of_swap = done.err.splitlines()
    assert of_compare.endswith(f"needs fairseq: {hint}")
    assert of_curves.endswith(hint)
    assert of_swap.endswith(f"needs transformers: {how_to_install('hf')}")


def with_examples() -> list[str]:
    """Return the modules whose docstrings have examples."""
    package = Path(fairseq_posenc.__file__).parent
    return [
        ".".join(path.relative_to(package.parent).with_suffix("").parts)
        for path in sorted(package.rglob("*.py"))
        if ">>> " in path.read_text(encoding="utf-8")
    ]


@pytest.mark.parametrize("module", with_examples())
def test_examples_of_docstrings_run(module):
    found = doctest.testmod(importlib.import_module(module))
    assert found.attempted > 0
    assert found.failed == 0


def example() -> str:
    code, *_ = re.findall(r"```python\n(.+?)```", (ROOT / "docs/library.md").read_text(), re.DOTALL)
    return code


@pytest.mark.slow
@pytest.mark.parametrize("spec", some_of(["m4m"], ["rope", "alibi", "m4m"]))
def test_the_example_trains_on_a_real_text_and_decodes(spec):
    code = example()
    assert len([line for line in code.splitlines() if line.strip()]) <= 60
    names: dict = {"__name__": "example"}
    exec(compile(code, "library.md", "exec"), names)
    text = "".join(pydoc_data.topics.topics.values())[:200_000]
    model, losses = names["train"](spec, text, updates=40)
    assert sum(losses[-10:]) / 10 < 0.6 * losses[0]
    model.eval()
    tokens = torch.randint(10, (2, 12))
    full = model(tokens)
    caches = [Cache() for _ in model.blocks]
    for i in range(12):
        step = model(tokens[:, i : i + 1], caches, past=i)
        torch.testing.assert_close(step[:, 0], full[:, i], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_the_notebook_prints_what_it_shows():
    matplotlib.use("agg")
    notebook = json.loads((ROOT / "docs/library.ipynb").read_text(encoding="utf-8"))
    names: dict = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            shown = [line for out in cell["outputs"] for line in out.get("text", ())]
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                exec(compile("".join(cell["source"]), "library.ipynb", "exec"), names)
            assert printed.getvalue() == "".join(shown)
    names["plt"].close("all")
