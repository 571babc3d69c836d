"""The reference vectors: what the oracles give, and the package; the checker tells a wrong one."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from fairseq_posenc import registry
from fairseq_posenc.api import PositionEncoding
from fairseq_posenc.positions import Positions
from tests.helpers import vectors
from tests.helpers.formulas import EOS, IN_FLOAT32, PAD

CHECK = vectors.FOLDER / "check.py"


@pytest.fixture(scope="module")
def stored() -> dict[str, Tensor]:
    return load_file(vectors.ARRAYS)


def of(name: str, stored: dict[str, Tensor]) -> dict[str, Tensor]:
    start = f"{name}/"
    return {key.removeprefix(start): x for key, x in stored.items() if key.startswith(start)}


def fill(module: nn.Module, arrays: dict[str, Tensor]) -> None:
    """Give an encoding the parameters of a case; a reset's two rows end the table there."""
    for key, parameter in module.named_parameters():
        name = "table" if key == "table.reset" else key.removesuffix(".weight")
        value = arrays[f"param.{name}"]
        if name == "table":
            value = value[:, -2:] if key == "table.reset" else value[:, : parameter.size(1)]
        parameter.data.copy_(value)


def ours(case: vectors.Case, arrays: dict[str, Tensor]) -> dict[str, Tensor]:
    """Compute a case with the package: its output, and the gradients of its inputs."""
    encoding = PositionEncoding(
        case.spec, case.dims.embed_dim, case.heads, case.max_positions, case.causal
    ).double()
    parts = [part for part in (encoding.input, encoding.shared, encoding.encodings) if part]
    module: Any
    (module,) = [part[case.item.name] for part in parts if case.item.name in part] or [nn.Module()]
    fill(module, arrays)
    if "added" in arrays:
        tokens = arrays["tokens"]
        found = module.embed(Positions.from_tokens(tokens, PAD, EOS, tokens.size(1)))
        return {"added": found.double().masked_fill(tokens.eq(PAD)[..., None], torch.nan)}
    names = [name for name in ("query", "key", "value", "inputs") if name in arrays]
    inputs = [arrays[name].clone().requires_grad_() for name in names]
    if "scores" in arrays:
        query, key, *of_gates = inputs
        output, found = "scores", encoding.scores(query, key, arrays["padding"], *of_gates)
    else:
        query, key, value = inputs
        output, of = "attended", (arrays["padding"], case.direction or None)
        found = encoding.attend(query, key, value, *of, backend="reference")
    found = found.masked_fill(arrays[output].isnan(), torch.nan)
    (found.nan_to_num() * arrays[f"{output}_incoming"]).sum().backward()
    grads = {f"{name}_grad": x.grad for name, x in zip(names, inputs) if x.grad is not None}
    return {output: found.detach(), **grads}


def test_every_encoding_has_one():
    assert {case.item.name for case in vectors.CASES.values()} == set(registry.names())


@pytest.mark.parametrize("name", vectors.CASES)
def test_the_package_passes(name, stored):
    case, arrays = vectors.CASES[name], of(name, stored)
    tolerance = 1e-5 if case.item.name in {*IN_FLOAT32, "sinusoidal"} else 1e-12
    for key, found in ours(case, arrays).items():
        torch.testing.assert_close(
            found, arrays[key], rtol=tolerance, atol=tolerance, equal_nan=True
        )


@pytest.mark.parametrize("name", vectors.CASES)
def test_they_are_what_the_oracles_give(name, stored):
    arrays = of(name, stored)
    now = vectors.arrays_of(vectors.CASES[name])
    torch.testing.assert_close(now, arrays, rtol=1e-12, atol=1e-12, equal_nan=True)
    written = json.loads(vectors.MEANING.read_text(encoding="utf-8"))[name]
    assert written == json.loads(json.dumps(vectors.meaning(vectors.CASES[name], arrays)))


def test_they_are_small():
    assert vectors.ARRAYS.stat().st_size + vectors.MEANING.stat().st_size < 2 * 2**20


def check(file) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-I", CHECK, file], capture_output=True, text=True, check=False
    )


def test_the_checker_tells_right_from_wrong(tmp_path, stored):
    results = {
        f"{name}/{key}": x.detach().numpy()
        for name, case in vectors.CASES.items()
        for key, x in ours(case, of(name, stored)).items()
    }
    np.savez(tmp_path / "mine.npz", **results)
    done = check(tmp_path / "mine.npz")
    assert done.returncode == 0, done.stdout
    assert len(done.stdout.splitlines()) == len(results)
    results["rope_half/scores"] = results["rope/scores"][:1]
    np.savez(tmp_path / "mine.npz", **results)
    assert check(tmp_path / "mine.npz").returncode == 1
