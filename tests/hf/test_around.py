"""Around a model: compilers, exports, optimizers, pipelines, devices, small weights."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import transformers
from accelerate import Accelerator, init_empty_weights
from transformers import AutoModelForCausalLM

from fairseq_posenc.backends import planner
from fairseq_posenc.backends.flex import build_block_mask
from fairseq_posenc.errors import UserError
from fairseq_posenc.hf import set_positions
from fairseq_posenc.mask import Mask
from fairseq_posenc.workbench.hf.folders import is_stock
from tests.helpers.hf_models import (
    MODELS,
    SYMBOLS,
    Cell,
    compute_logits,
    distance,
    edit_config,
    make_inputs,
    position_parameters,
    save_tokenizer,
)
from tests.helpers.products import product_of, some_of
from tests.helpers.uncompiled_flex import run_uncompiled

# Vectors at the input, terms of the scores with limits, and rotations that the model applies.
SPECS = ["learned+m4m", "t5+window(size=4)+sink", "rope(layout=half)"]
FEW = {"num_hidden_layers": 2}  # of graphs, which are as alike as their layers
GRAPHS = [("llama", spec) for spec in some_of(SPECS[2:], SPECS)]
GRAPHS += [("mistral", "own"), ("modernbert", "own")]  # with masks of windows


@pytest.mark.parametrize(("name", "spec"), GRAPHS)
def test_compiled_as_a_single_graph(name: str, spec: str) -> None:
    cell = Cell.build(name, spec, **FEW)
    expected = compute_logits(cell.model, cell.inputs)
    compiled = torch.compile(cell.model, backend="aot_eager", fullgraph=True)
    assert distance(compute_logits(compiled, cell.inputs), expected) < 1e-5
    with pytest.raises(UserError, match="OptimizedModule is not a transformers model"):
        set_positions(compiled, "alibi")


def test_a_compiled_model_follows_when_its_positions_are_set() -> None:
    cell = Cell.build("llama", "alibi", num_hidden_layers=1)
    cell.model.compile(backend="eager")
    before = compute_logits(cell.model, cell.inputs)
    set_positions(cell.model, "t5+sink")
    fresh = set_positions(MODELS["llama"].build(num_hidden_layers=1), "t5+sink")
    fresh.load_state_dict(cell.model.state_dict())
    logits = compute_logits(cell.model, cell.inputs)
    assert distance(logits, compute_logits(fresh, cell.inputs)) < 1e-5
    assert distance(logits, before) > 1e-2


BATCH, LENGTH = torch.export.Dim("batch", max=8), torch.export.Dim("length", min=4, max=60)


@pytest.mark.parametrize(("name", "spec"), product_of(["llama", "bert"], some_of(SPECS[:2], SPECS)))
def test_exported_for_inputs_of_any_size(name: str, spec: str) -> None:
    cell = Cell.build(name, spec, **FEW)
    cell.model.config.use_cache = False
    sizes = {key: {0: BATCH, 1: LENGTH} for key in cell.inputs}
    exported = torch.export.export(cell.model, (), cell.inputs, dynamic_shapes=sizes, strict=False)
    program = exported.module()
    for batch, length in ((2, 4), (7, 12), (3, 30)):
        inputs = make_inputs(cell.tiny, batch, length)
        assert distance(program(**inputs).logits, compute_logits(cell.model, inputs)) < 1e-5


@pytest.mark.matrix  # the library's graphs and the exports above have as much
@pytest.mark.parametrize(("name", "spec"), [("llama", "own(scaling=yarn:2)"), ("bert", "rope")])
def test_rotations_become_an_onnx_graph(name: str, spec: str, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime", reason="pip install 'fairseq-posenc[onnx]'")
    pytest.importorskip("onnxscript", reason="pip install 'fairseq-posenc[onnx]'")
    cell = Cell.build(name, spec)
    cell.model.config.use_cache = False
    sizes = {key: {1: LENGTH} for key in cell.inputs}
    path = str(tmp_path / "model.onnx")
    torch.onnx.export(
        cell.model, kwargs=cell.inputs, f=path, dynamic_shapes=sizes, dynamo=True, verbose=False
    )
    session = onnxruntime.InferenceSession(path)
    for length in (12, 30):
        inputs = make_inputs(cell.tiny, length=length)
        logits = torch.from_numpy(session.run(None, {k: x.numpy() for k, x in inputs.items()})[0])
        assert distance(logits, compute_logits(cell.model, inputs)) < 1e-5


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2"])
def test_a_window_of_earlier_positions_is_forgotten(name: str, tmp_path: Path) -> None:
    """They leave attention to the model, before and after they are saved."""
    model = MODELS[name].build()
    for spec in ("rope(layout=half)+window(size=3)", "rope(layout=half)"):
        set_positions(model, spec)
    assert model.config._attn_implementation == "sdpa"
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert is_stock(tmp_path)
    inputs = make_inputs(MODELS[name])
    logits = compute_logits(set_positions(MODELS[name].build(), "rope(layout=half)"), inputs)
    for other in (model, loaded):
        assert distance(compute_logits(other, inputs), logits) < 1e-5


@pytest.mark.parametrize("spec", ["rope(layout=half)", "alibi", "window(size=3),none"])
def test_windows_by_type_of_layer_are_replaced(spec: str) -> None:
    settings = {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 1}
    cell = Cell.build("qwen2", spec, **settings)
    expected = compute_logits(Cell.build("qwen2", spec).model, cell.inputs)
    assert distance(compute_logits(cell.model, cell.inputs), expected) < 1e-5


def test_pipelines_generate_from_folders(tmp_path: Path) -> None:
    cell = Cell.build("llama", "learned+m4m")
    cell.model.save_pretrained(tmp_path)
    save_tokenizer(tmp_path, [f"w{index}" for index in range(SYMBOLS - 2)])
    edit_config(tmp_path, "tokenizer_config.json", pad_token="<s>", padding_side="left")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    pipeline = transformers.pipeline("text-generation", model=str(tmp_path))
    texts = ["w5 w6 w7", "w8"]
    settings = {"max_new_tokens": 4, "do_sample": False}
    results = pipeline(texts, batch_size=2, return_full_text=False, **settings)
    for text, (result,) in zip(texts, results):
        ids = tokenizer(text, return_tensors="pt", return_token_type_ids=False)
        expected = cell.model.generate(**ids, pad_token_id=0, **settings)
        new = tokenizer.decode(expected[0, ids["input_ids"].size(1) :], skip_special_tokens=True)
        assert result["generated_text"].split() == new.split()


DISK = {f"model.{part}": "disk" for part in ("embed_tokens", "layers.1", "layers.2", "layers.3")}
PARTS = "model.embed_tokens model.layers.0 model.norm model.rotary_emb model.positions lm_head"
PLACES = dict.fromkeys(PARTS.split(), "cpu")


@pytest.mark.parametrize("places", ["auto", "cpu", "layers on disk"])
@pytest.mark.parametrize("spec", ["alibi", "learned+m4m"])
def test_devices_by_part(spec: str, places: str, tmp_path: Path) -> None:
    cell = Cell.build("llama", spec)
    cell.model.save_pretrained(tmp_path)
    device_map = {**PLACES, **DISK} if places == "layers on disk" else places
    settings = {"device_map": device_map, "offload_folder": str(tmp_path / "disk")}
    model = AutoModelForCausalLM.from_pretrained(tmp_path, **settings)
    if places == "layers on disk" and spec != "alibi":  # whose parameters would stay empty
        with pytest.raises(UserError, match="accelerate has offloaded trained positions"):
            compute_logits(model, cell.inputs)
    else:
        expected = compute_logits(cell.model, cell.inputs)
        assert distance(compute_logits(model, cell.inputs), expected) < 1e-5


def test_a_model_is_built_without_weights_and_gets_them_later() -> None:
    cell = Cell.build("llama", "lerope")
    with init_empty_weights():
        model = set_positions(MODELS["llama"].build(), "lerope")
    model.load_state_dict(cell.model.state_dict(), assign=True)
    assert torch.equal(compute_logits(model, cell.inputs), compute_logits(cell.model, cell.inputs))


def test_accelerate_prepares_models(tmp_path: Path) -> None:
    cell = Cell.build("llama", "learned+m4m")
    accelerator = Accelerator(cpu=True)
    sgd = torch.optim.SGD(cell.model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(cell.model, sgd)
    accelerator.backward(model(**cell.inputs, labels=cell.inputs["input_ids"]).loss)
    optimizer.step()
    accelerator.save_state(str(tmp_path))
    expected = compute_logits(model, cell.inputs)
    optimizer.step()
    assert distance(compute_logits(model, cell.inputs), expected) > 1e-3
    accelerator.load_state(str(tmp_path))
    assert torch.equal(compute_logits(model, cell.inputs), expected)
    set_positions(accelerator.unwrap_model(model), "t5")
    with pytest.raises(UserError, match="weights trained with"):
        accelerator.load_state(str(tmp_path))


def test_quantized_weights(tmp_path: Path) -> None:
    quantization = pytest.importorskip("torchao.quantization", reason="needs torchao")
    cell = Cell.build("llama", "learned+m4m")
    expected = compute_logits(cell.model, cell.inputs)
    cell.model.save_pretrained(tmp_path)
    small = transformers.TorchAoConfig(quantization.Int8WeightOnlyConfig())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=small)
    assert type(loaded.model.layers[0].self_attn.q_proj.weight) is not torch.nn.Parameter
    assert {x.dtype for x in position_parameters(loaded).values()} == {torch.float32}
    assert 0 < distance(compute_logits(loaded, cell.inputs), expected) < 0.1
    with pytest.raises(UserError, match="cannot be saved with its positions: save it before"):
        loaded.save_pretrained(tmp_path / "quantized")  # without what stops stock classes
    stock = MODELS["llama"].build()
    quantization.quantize_(stock, quantization.Int8WeightOnlyConfig())
    before = compute_logits(stock, cell.inputs)
    set_positions(stock, "own")
    assert distance(compute_logits(stock, cell.inputs), before) < 1e-5
    copy.deepcopy(set_positions(stock, "m4m"))(**cell.inputs)


def test_a_model_with_flex_attention_keeps_it(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_uncompiled(monkeypatch)
    monkeypatch.setattr(planner, "_logged", set())  # each choice is logged once in a process
    cell = Cell.build("llama", "own+window(size=4)")
    model = MODELS["llama"].build()
    model.set_attn_implementation("flex_attention")
    set_positions(model, "own+window(size=4)").load_state_dict(cell.model.state_dict())
    with caplog.at_level("INFO", "fairseq_posenc"), torch.no_grad():
        logits = compute_logits(model, cell.inputs)
    assert ": flex, requested" in caplog.text
    assert distance(logits, compute_logits(cell.model, cell.inputs)) < 1e-5
    with pytest.raises(UserError, match="flex cannot compute this: counted positions"):
        set_positions(model, "cope")
    model.set_attn_implementation("sdpa")
    set_positions(model, "own")(**cell.inputs).logits.sum().backward()
    blocks = build_block_mask(Mask("lr"), 12, 12, torch.device("cpu"))
    with pytest.raises(UserError, match="needs attn_implementation='flex_attention'"):
        set_positions(MODELS["llama"].build(), "own")(torch.ones(1, 12).long(), blocks)
