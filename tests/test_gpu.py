"""On a GPU: encodings, backends and both hosts compute what they compute on the processor."""

from __future__ import annotations

import copy

import pytest
import torch

from fairseq_posenc.api import SelfAttention, StackPositions
from fairseq_posenc.backends import planner
from fairseq_posenc.errors import UserError
from fairseq_posenc.registry import names
from tests.helpers.formulas import awake, padding_of
from tests.helpers.hf_models import MODELS, PADDING, Cell, compute_logits, distance, pad
from tests.helpers.products import product_of
from tests.helpers.tiny_models import (
    COMPOSITIONS,
    PATTERNS,
    REPRESENTATIVES,
    assert_decoding_equals_full_pass,
    logits,
    make_model,
    make_tokens,
    needs_causal,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CPU, GPU = torch.device("cpu"), torch.device("cuda")
LIMITED = ["rope+window(size=4)", "alibi+window(size=4,first=2)", "t5+chunk(size=6)", "rope+sink"]
SPECS = [*names(), *COMPOSITIONS, *PATTERNS, *LIMITED, "rope+softcap(cap=2)", "alibi+ssmax"]
IN_MODELS = [*REPRESENTATIVES, *LIMITED]
BY_DISTANCE = ["alibi", "t5", "m4m", "deberta", "shaw+shaw_values", "m4(reset=true)", "raffel"]
FAMILIES = ["masked_lm", "causal_lm", "translation"]
# What a backend refuses by design; on a GPU all the rest has to be served.
REFUSED = {
    "sdpa": ["m4m", "deberta", "shaw+shaw_values", "m4(reset=true)", "rope+sink"],
    "triton": ["alibi+window(size=4,first=2)", "rope+sink", "shaw+shaw_values", "m4(reset=true)"],
    "flex": ["shaw+shaw_values"],
}
LONG = 200  # tokens: several blocks of each backend


def run_layer(spec: str, device: torch.device, length: int = 11, width: int = 32, **options):
    """Attend on a device; return outputs and gradients, on the processor."""
    torch.manual_seed(1)
    positions = StackPositions(spec, width, 4, max_positions=length, causal=needs_causal(spec))
    layer = SelfAttention(awake(positions), **options)
    awake(layer.encodings)
    layer.to(device)
    x = torch.randn(3, length, width)
    padding = padding_of(length, 0, -2, 2)
    weight = torch.randn(3, length, width).masked_fill(padding[..., None], 0.0).to(device)
    embedded, shared = positions.to(device)(x.to(device), padding.to(device))
    output, _ = layer(embedded, shared)
    (output * weight).sum().backward()
    grads = {
        f"{name}.{place}": parameter.grad.cpu()
        for name, module in {"positions": positions, "layer": layer}.items()
        for place, parameter in module.named_parameters()
        if parameter.grad is not None
    }
    return {"output": (output * weight).detach().cpu(), **grads}


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance=1e-4):
    assert found.keys() == expected.keys()
    largest = max(float(x.abs().max()) for x in expected.values())
    for name, x in expected.items():
        # The gradient of a bias of keys is 0, and differs by rounding.
        scale = max(float(x.abs().max()), 0.03 * largest)
        assert float((found[name] - x).abs().max()) < tolerance * scale, name


@pytest.mark.parametrize("spec", SPECS)
def test_a_layer_and_its_gradients(spec):
    assert_close(run_layer(spec, GPU), run_layer(spec, CPU))


@pytest.mark.parametrize("backend", planner.BACKENDS)
@pytest.mark.parametrize("spec", [*BY_DISTANCE, *LIMITED, "none"])
def test_every_backend_that_serves_it(spec, backend):
    expected = run_layer(spec, CPU, LONG, 64, backend="reference")
    if spec in REFUSED.get(backend, ()):
        with pytest.raises(UserError):
            run_layer(spec, GPU, LONG, 64, backend=backend)
    else:
        assert_close(run_layer(spec, GPU, LONG, 64, backend=backend), expected, 1e-3)


@pytest.mark.parametrize("backend", ["auto", "triton"])
@pytest.mark.parametrize("spec", ["alibi", "m4m"])
def test_a_compiled_layer(spec, backend):
    torch.manual_seed(1)
    positions = awake(StackPositions(spec, 64, 4, max_positions=LONG)).to(GPU)
    layer = SelfAttention(positions, backend=backend).to(GPU)
    awake(layer.encodings)
    x, shared = positions(torch.randn(2, LONG, 64, device=GPU))
    assert distance(torch.compile(layer)(x, shared)[0], layer(x, shared)[0]) < 1e-4


@pytest.mark.parametrize(("family", "spec"), product_of(FAMILIES, IN_MODELS))
def test_models_of_fairseq(family, spec):
    if family != "causal_lm" and needs_causal(spec):
        return
    torch.manual_seed(1)
    model = awake(make_model(family, position_encoding=spec))
    tokens = make_tokens(padding=3)
    expected = logits(model, family, tokens)
    found = logits(model.to(GPU), family, tokens.to(GPU)).cpu()
    seen = tokens.ne(1)
    assert distance(found[seen], expected[seen]) < 1e-4
    if family != "masked_lm":
        with GPU:
            source = make_tokens(1).repeat(3, 1)
            orders = [[0, 1, 2], [1, 0, 2], [2, 2, 0]]
            assert_decoding_equals_full_pass(model, family, source, orders, 1e-3)


IN_TRANSFORMERS = [
    (name, spec)
    for name, spec in product_of(MODELS, ["own", *IN_MODELS], times=3)
    if spec == "own"
    or not needs_causal(spec)
    or (MODELS[name].generates and not MODELS[name].has_encoder)
]


@pytest.mark.parametrize(("name", "spec"), IN_TRANSFORMERS)
def test_models_of_transformers(name, spec):
    cell = Cell.build(name, spec)
    inputs = cell.inputs if MODELS[name].hears else pad(cell.inputs, 3, 0)
    there = {key: x.to(GPU) for key, x in inputs.items()}
    on_gpu = copy.deepcopy(cell.model).to(GPU)
    expected, found = compute_logits(cell.model, inputs), compute_logits(on_gpu, there).cpu()
    assert distance(found[:, 3:], expected[:, 3:]) < 1e-4
    halves = {key: x.bfloat16() if x.is_floating_point() else x for key, x in there.items()}
    in_half = compute_logits(copy.deepcopy(on_gpu).bfloat16(), halves).float().cpu()
    assert distance(in_half[:, 3:], expected[:, 3:]) < 0.5
    if MODELS[name].generates:
        moved = cell._replace(model=on_gpu, inputs={k: x.to(GPU) for k, x in cell.inputs.items()})
        assert moved.compare_cache() < 1e-4
        assert moved.compare_generated(do_sample=False)


@pytest.mark.parametrize("spec", ["own", "alibi", "m4m", "own+window(size=8,first=2)"])
def test_a_trained_step_in_half_precision(spec):
    model = Cell.build("llama", spec).model.to(GPU).train()
    ids = torch.randint(3, 90, (2, 40), device=GPU)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cuda", dtype):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        assert loss.isfinite()
        assert all(x.grad.isfinite().all() for x in model.parameters() if x.grad is not None)


@pytest.mark.parametrize("spec", ["own", "alibi", "m4m"])
def test_a_compiled_model_of_transformers(spec):
    cell = Cell.build("llama", spec)
    model = cell.model.to(GPU)
    inputs = {key: x.to(GPU) for key, x in pad(cell.inputs, 3, 0).items()}
    expected = compute_logits(model, inputs)[:, 3:]
    assert distance(compute_logits(torch.compile(model), inputs)[:, 3:], expected) < 1e-4
    if spec == "own":  # a static cache serves rotations alone
        settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": PADDING}
        tokens = model.generate(**inputs, **settings, cache_implementation="static")
        assert torch.equal(tokens, model.generate(**inputs, **settings))
