"""The library's layers as graphs of torch.export, torch.compile and ONNX, at any length.

Elsewhere lengths are numbers: here one that a layer branches on shows, as a guard or a wrong graph.
"""

from itertools import product

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

from fairseq_posenc import registry
from fairseq_posenc.api import Cache, SelfAttention, StackPositions
from tests.helpers.formulas import awake
from tests.helpers.products import product_of, some_of
from tests.helpers.tiny_models import COMPANIONS, needs_causal

# Of one token and two, and below and above what the planner takes other backends for.
LENGTHS = (1, 2, 3, 7, 20, 56)
WINDOWS = ["rope+window(size=4)", "alibi+window(size=20)", "3*rope+window(size=30),none"]
WINDOWS += ["t5+window(size=20,first=3)", "cope+window(size=4,first=2,prefill=true)"]
SPECS = [
    *registry.names(),
    *(f"rope+{name}" for name in COMPANIONS),
    *("learned+m4m(reset=true)", "rope(layout=half)+shaw", "m4m(max_distance=4)", *WINDOWS),
    *("rope+ssmax+documents", "sentence_learned+documents", "alibi+randomized"),
    *("m4m+window(size=6,first=1)+documents", "rope+ssmax+window(size=30,first=4)"),
]
# Tables, counted positions, and limits with and without documents.
CHOSEN = ["learned+m4m(reset=true)", "cope", *SPECS[-2:]]
STEPPED = ["rope+window(size=4)", "learned+m4m", "t5+window(size=4,first=2)"]
ONNX = ["learned+m4m", "rope", "t5", "deberta_v2", "rope+ssmax", *WINDOWS]
DYNAMIC = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}


class Layer(nn.Module):
    def __init__(self, spec: str, causal: bool | None = None) -> None:
        super().__init__()
        causal = needs_causal(spec) if causal is None else causal
        self.positions = awake(StackPositions(spec, 16, 2, max_positions=64, causal=causal))
        self.attention = SelfAttention(self.positions)
        awake(self.attention.encodings)
        self.packed = "documents" in spec

    def forward(
        self, x: torch.Tensor, padding: torch.Tensor, documents: torch.Tensor | None = None
    ) -> torch.Tensor:
        x, shared = self.positions(x, padding, document_ids=documents)
        attended: torch.Tensor = self.attention(x, shared)[0]
        return attended


def inputs(layer: Layer, length: int, batch: int = 2) -> tuple[torch.Tensor, ...]:
    padding = torch.zeros(batch, length, dtype=torch.bool)
    if length > 3:
        padding[0, -2:] = padding[1:, :1] = True
    x = torch.randn(batch, length, 16)
    if not layer.packed:
        return x, padding
    documents = torch.arange(length).div(3, rounding_mode="floor").expand(batch, -1).contiguous()
    return x, padding, documents


@torch.no_grad()
def check(layer: Layer, graph, lengths=LENGTHS, batches=(1, 3)) -> None:
    for length, batch in product(lengths, batches):
        given = inputs(layer, length, batch)
        real = ~given[1]
        torch.testing.assert_close(graph(*given)[real], layer(*given)[real], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("spec", "traced"), product_of(some_of(CHOSEN, SPECS), [2, 7]))
def test_an_exported_layer_takes_any_length_and_batch(spec, traced):
    layer = Layer(spec).eval()
    given = inputs(layer, traced, 3)
    check(layer, torch.export.export(layer, given, dynamic_shapes=(DYNAMIC,) * len(given)).module())


COMPILED = ["none", "rope+alibi", "learned+m4m", "rope+window(size=4)", WINDOWS[3]]


@pytest.mark.matrix  # inductor compiles C++ for minutes; exports and steps are graphs as well
@pytest.mark.parametrize(("spec", "backend"), list(product(COMPILED, ["inductor", "aot_eager"])))
def test_a_layer_is_one_graph_when_compiled(spec, backend):
    torch._dynamo.reset()  # the limit of compilations is for a function, not for a model
    layer = Layer(spec).eval()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=backend)
    check(layer, compiled, LENGTHS[1:], batches=(2,))  # one token is another graph: below


@pytest.mark.slow
@pytest.mark.parametrize("spec", some_of(STEPPED[:1], STEPPED))
def test_decoding_is_compiled_in_its_first_steps_alone(spec):
    torch._dynamo.reset()
    layer, steps = Layer(spec, causal=True).eval(), 40
    counter = CompileCounter()

    @torch.compile(backend=counter, fullgraph=True)
    def step(x: torch.Tensor, cache: Cache) -> torch.Tensor:
        x, shared = layer.positions(x, past=cache)
        attended: torch.Tensor = layer.attention(x, shared, cache)[0]
        return attended

    x, padding = torch.randn(2, steps, 16), torch.zeros(2, steps, dtype=torch.bool)
    cache, graphs = Cache(), []
    with torch.no_grad():
        full = layer(x, padding)
        for i in range(steps):
            torch.testing.assert_close(step(x[:, [i]], cache)[:, 0], full[:, i])
            graphs.append(counter.frame_count)
    assert graphs[12] == graphs[-1] < 8


@pytest.mark.slow
@pytest.mark.parametrize("spec", some_of(ONNX[:1], ONNX))
def test_a_layer_becomes_an_onnx_graph(spec):
    pytest.importorskip("onnxruntime", reason="pip install 'fairseq-posenc[onnx]'")
    pytest.importorskip("onnxscript", reason="pip install 'fairseq-posenc[onnx]'")
    layer = Layer(spec).eval()
    shapes, given = (DYNAMIC, DYNAMIC), inputs(layer, 7, 3)
    graph = torch.onnx.export(layer, given, dynamic_shapes=shapes, dynamo=True, verbose=False)
    check(layer, lambda *given: graph(*given)[0])  # computed by onnxruntime
