"""The library without fairseq: it is light, alone, and gives what the plugin gives."""

from __future__ import annotations

import importlib.metadata
import pydoc_data.topics
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fairseq_posenc
from fairseq_posenc import registry
from fairseq_posenc.api import PositionEncoding, SelfAttention, StackPositions
from fairseq_posenc.backends import available
from fairseq_posenc.errors import UserError
from fairseq_posenc.transformer.attention import PositionalAttention
from fairseq_posenc.transformer.forward_context import set_context
from tests.helpers.formulas import awake
from tests.helpers.tiny_models import COMPOSITIONS, needs_causal

ROOT = Path(fairseq_posenc.__file__).resolve().parents[1]
SPECS = [*registry.names(), *COMPOSITIONS, "m4m(per_head=true)"]
# Read in another program: what an import brings and changes, and its processor time.
LIGHT = """
import sys, time, logging, warnings
import torch
before = (sys.excepthook, logging.root.level, list(logging.root.handlers), list(warnings.filters))
began = time.process_time()
import fairseq_posenc, fairseq_posenc.api
seconds = time.process_time() - began
after = (sys.excepthook, logging.root.level, list(logging.root.handlers), list(warnings.filters))
heavy = {"fairseq", "hydra", "omegaconf", "matplotlib", "sklearn", "triton"} & set(sys.modules)
print(seconds, before == after, sorted(heavy))
"""
# The same, and a layer that attends, where nothing but torch, numpy and what they need is found.
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
"""


def test_an_import_is_light_and_changes_nothing():
    done = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True, check=True)
    seconds, unchanged, heavy = done.stdout.split(maxsplit=2)
    assert (unchanged, heavy.strip()) == ("True", "[]")
    assert float(seconds) < 0.5
    assert done.stderr == ""


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


def test_it_works_where_there_is_only_torch_and_numpy(tmp_path):
    site = Path(torch.__file__).parents[1]
    for name in needed("torch", needed("numpy", set())):
        for top in {file.parts[0] for file in importlib.metadata.files(name) or ()} - {".."}:
            if (site / top).exists() and not (tmp_path / top).exists():
                (tmp_path / top).symlink_to(site / top)
    done = subprocess.run(
        [sys.executable, "-I", "-c", ALONE, str(tmp_path), str(ROOT)],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.stdout == "torch.Size([2, 5, 16])\n", done.stderr


def both(spec: str, direction: str = "both"):
    """Return the library's layer with its stack, and the plugin's attention with its weights."""
    causal = needs_causal(spec) or direction == "lr"
    positions = awake(StackPositions(spec, 16, 2, max_positions=12, causal=causal))
    ours = SelfAttention(positions, direction=direction if not causal else None)
    awake(ours.encodings)
    theirs = PositionalAttention(16, 2, positions.assembly.build_layer(), ours.direction)
    theirs.load_state_dict(ours.state_dict())
    return positions.eval(), ours.eval(), theirs.eval()


@pytest.mark.parametrize("direction", ["both", "lr", "rl"])
@pytest.mark.parametrize("spec", SPECS)
def test_a_layer_equals_the_plugins_with_the_same_weights(spec, direction):
    if direction == "rl" and needs_causal(spec):
        return  # a causal stack has one direction
    positions, ours, theirs = both(spec, direction)
    embeddings = torch.randn(3, 7, 16)
    padding = torch.zeros(3, 7, dtype=torch.bool)
    padding[1, -2:] = True
    padding[2, :2] = True
    x, shared = positions(embeddings, padding)
    found, weights = ours(x, shared, need_weights=True)
    batch_second = x.transpose(0, 1)
    with set_context(shared):
        expected, _ = theirs(batch_second, None, None, key_padding_mask=padding)
    torch.testing.assert_close(found, expected.transpose(0, 1), rtol=1e-6, atol=1e-6)
    assert weights.shape == (3, 2, 7, 7)
    without, nothing = ours(x, shared)
    torch.testing.assert_close(without, found, rtol=1e-5, atol=1e-5)
    assert nothing is None


@pytest.mark.parametrize("spec", [s for s in SPECS if s != "sentence_learned+m4"])
def test_step_by_step_equals_the_full_pass(spec):
    positions, ours, _ = both(spec, "lr")
    embeddings = torch.randn(2, 9, 16)
    padding = torch.zeros(2, 9, dtype=torch.bool)
    padding[1, :2] = True
    full = ours(*positions(embeddings, padding))[0]
    cache: dict = {}
    steps = [slice(0, 3), *(slice(i, i + 1) for i in range(3, 8)), slice(8, 9)]
    for step in steps:
        x, shared = positions(embeddings[:, step], padding[:, : step.stop], past=step.start)
        found = ours(x, shared, cache)[0]
        real = ~padding[:, step]
        torch.testing.assert_close(found[real], full[:, step][real], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("spec", ["none", "rope+shaw", "learned+m4m", "t5", "tupe", "deberta_v2"])
@pytest.mark.parametrize("backend", ["auto", "blocked", "sdpa", "reference"])
def test_every_backend_attends_alike(spec, backend):
    """Also with keys of earlier steps, a direction, and padding on either side."""
    encoding = awake(PositionEncoding(spec, 16, 2, max_positions=64))
    # In the order in which a projection of (batch, length, embed_dim) leaves them in memory.
    query, key, value = (torch.randn(2, n, 2, 8).transpose(1, 2) for n in (50, 60, 60))
    padding = torch.zeros(2, 60, dtype=torch.bool)
    padding[0, -4:] = True
    padding[1, :4] = True

    def attended(backend: str) -> torch.Tensor:
        return encoding.attend(query, key, value, padding, direction="lr", backend=backend)

    expected = attended("reference")
    if backend == "sdpa" and spec not in ("none", "t5", "tupe"):
        with pytest.raises(UserError, match="sdpa cannot compute this"):
            attended(backend)
        return
    torch.testing.assert_close(attended(backend), expected, rtol=1e-4, atol=1e-5)


def test_dropout_drops_and_keeps_the_mean():
    encoding = PositionEncoding("alibi", 16, 2, causal=True)
    query, key = torch.zeros(2, 1, 2, 100, 8)
    value = torch.ones(1, 2, 100, 8)
    torch.manual_seed(0)
    dropped = encoding.attend(query, key, value, dropout=0.5)
    assert not torch.allclose(dropped, torch.ones_like(dropped))
    assert dropped.mean() == pytest.approx(1.0, abs=0.1)


def test_shared_encodings_are_one_for_all_layers():
    positions = StackPositions("learned+t5+m4m", 16, 2)
    layers = [SelfAttention(positions) for _ in range(3)]
    assert [name for name, _ in positions.named_parameters()] == [
        "input.learned.table.weight",
        "shared.t5.table",
    ]
    own = {id(layer.encodings["m4m"].table.weight) for layer in layers}
    assert len(own) == 3
    assert not any("t5" in name for layer in layers for name, _ in layer.named_parameters())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"direction": "up"}, "choose one of both, lr, rl"),
        ({"backend": "sdpa"}, "sdpa cannot compute this"),
        ({"backend": "fast"}, "unknown backend 'fast'"),
    ],
)
def test_a_layer_that_cannot_be_is_refused(options, message):
    with pytest.raises(UserError, match=message):
        SelfAttention(StackPositions("m4m", 16, 2), **options)
    with pytest.raises(UserError, match="in a causal stack it is lr"):
        SelfAttention(StackPositions("m4m", 16, 2, causal=True), direction="rl")


def test_backends_that_cannot_run_here_say_so():
    assert all(isinstance(reason, str) for reason in available().values())


def example() -> str:
    (code,) = re.findall(r"```python\n(.+?)```", (ROOT / "docs/library.md").read_text(), re.DOTALL)
    return code


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["rope", "alibi", "m4m"])
def test_the_example_trains_on_a_real_text_and_decodes(spec):
    code = example()
    assert len([line for line in code.splitlines() if line.strip()]) <= 60
    names: dict = {"__name__": "example"}
    exec(compile(code, "library.md", "exec"), names)
    text = "".join(pydoc_data.topics.topics.values())[:200_000]
    model, losses = names["train"](spec, text, updates=120)
    assert sum(losses[-10:]) / 10 < 0.72 * losses[0]
    model.eval()
    tokens = torch.randint(10, (2, 12))
    full = model(tokens)
    caches: list[dict] = [{} for _ in model.blocks]
    for i in range(12):
        step = model(tokens[:, i : i + 1], caches, past=i)
        torch.testing.assert_close(step[:, 0], full[:, i], rtol=1e-4, atol=1e-5)
