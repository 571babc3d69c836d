"""The library's layers as graphs of torch.export, torch.compile and ONNX, at any length."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fairseq_posenc import registry
from fairseq_posenc.api import SelfAttention, StackPositions
from tests.helpers.formulas import awake
from tests.helpers.tiny_models import needs_causal

LENGTHS = (3, 20, 60)  # below and above what the planner takes other backends for
SPECS = [*registry.names(), "learned+m4m(reset=true)", "rope(layout=half)+shaw"]


class Layer(nn.Module):
    def __init__(self, spec: str) -> None:
        super().__init__()
        causal = needs_causal(spec)
        self.positions = awake(StackPositions(spec, 16, 2, max_positions=64, causal=causal))
        self.attention = SelfAttention(self.positions)
        awake(self.attention.encodings)

    def forward(self, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        x, shared = self.positions(x, padding)
        attended: torch.Tensor = self.attention(x, shared)[0]
        return attended


def inputs(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    padding = torch.zeros(2, length, dtype=torch.bool)
    padding[0, -2:] = padding[1, :1] = True
    return torch.randn(2, length, 16), padding


def dynamic() -> tuple[dict, dict]:
    return {1: torch.export.Dim.DYNAMIC}, {1: torch.export.Dim.DYNAMIC}


@torch.no_grad()
def check(layer: Layer, graph) -> None:
    for length in LENGTHS:
        given = inputs(length)
        real = ~given[1]
        torch.testing.assert_close(graph(*given)[real], layer(*given)[real], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("spec", SPECS)
def test_an_exported_layer_takes_any_length(spec):
    layer = Layer(spec).eval()
    program = torch.export.export(layer, inputs(7), dynamic_shapes=dynamic())
    check(layer, program.module())


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["none", "rope+alibi", "learned+m4m"])
def test_a_layer_is_one_graph_when_compiled(spec):
    layer = Layer(spec).eval()
    check(layer, torch.compile(layer, fullgraph=True, dynamic=True))


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["rope", "t5", "learned+m4m"])
def test_a_layer_becomes_an_onnx_graph(spec, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime", reason="pip install 'fairseq-posenc[onnx]'")
    pytest.importorskip("onnxscript", reason="pip install 'fairseq-posenc[onnx]'")
    layer = Layer(spec).eval()
    path = str(tmp_path / "layer.onnx")
    sizes = {"x": dynamic()[0], "padding": dynamic()[1]}
    torch.onnx.export(layer, inputs(7), path, dynamic_shapes=sizes, dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(path)

    def graph(*given):
        names = (each.name for each in session.get_inputs())
        (found,) = session.run(None, {n: x.numpy() for n, x in zip(names, given)})
        return torch.from_numpy(found)

    check(layer, graph)
