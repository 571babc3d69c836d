"""Folders of models with positions: saved, loaded, and never read as the stock model."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedModel

from fairseq_posenc.encodings.local_attention import Window
from fairseq_posenc.encodings.t5 import T5
from fairseq_posenc.errors import UserError
from fairseq_posenc.hf import read_positions, set_positions
from fairseq_posenc.hf.saving import AUTO_CLASSES
from fairseq_posenc.workbench.hf.folders import is_stock, load_model
from tests.helpers.commands import run
from tests.helpers.hf_models import (
    MODELS,
    compute_logits,
    distance,
    edit_config,
    edit_weights,
    make_inputs,
    redraw_positions,
)
from tests.helpers.products import product_of
from tests.hf.test_families import build

TIED = "t5(scale_factor=2)+sink+tupe(tie_projections=true)"
SPECS = ["none", "alibi", "learned+m4m", f"2*rope+window(size=4),{TIED}", "own"]
QUERIES = "model.layers.0.self_attn.q_proj.weight"
SUFFIXED = f"{QUERIES}.fairseq_posenc_set_positions_first"
TRAINED = {"original_max_position_embeddings": 16}


def make_model(name: str = "llama", spec: str = "learned+m4m", **settings: Any) -> PreTrainedModel:
    model = set_positions(MODELS[name].build(**settings), spec)
    torch.manual_seed(3)
    redraw_positions(model)
    return model


def load(name: str, folder: Path) -> PreTrainedModel:
    """Load a model of a name by the Auto class of its head."""
    stock: Any = getattr(transformers, MODELS[name].model)
    with_head = (x for x in AUTO_CLASSES if x._model_mapping.get(stock.config_class, None) is stock)
    return next(with_head).from_pretrained(folder)


@pytest.mark.parametrize(("name", "spec"), product_of(MODELS, SPECS))
def test_a_loaded_model_equals_the_saved_one(name: str, spec: str, tmp_path: Path) -> None:
    model, inputs = make_model(name, spec), make_inputs(MODELS[name])
    logits = compute_logits(model, inputs)
    model.save_pretrained(tmp_path / "once")
    loaded = load(name, tmp_path / "once")
    assert read_positions(loaded) == read_positions(model)
    AutoModel.from_pretrained(tmp_path / "once")  # which refuses weights that the model lacks
    assert not loaded.training
    loaded.save_pretrained(tmp_path / "again", max_shard_size="20KB")
    assert len(list((tmp_path / "again").glob("*.safetensors"))) > 1
    for again in (loaded, load(name, tmp_path / "again")):
        if is_stock(tmp_path / "once"):
            assert distance(compute_logits(again, inputs), logits) < 2e-5
        else:
            assert type(again) is type(model)
            assert torch.equal(compute_logits(again, inputs), logits)


def test_auto_classes_of_every_version_take_our_configurations() -> None:
    """From 5.14 to 5.23, they ignore the registration of one in a module of transformers."""
    assert type(make_model().config).__module__.startswith("fairseq_posenc.")


@pytest.mark.parametrize("name", ["FunnelModel", "FunnelBaseModel", "FunnelForMaskedLM"])
def test_a_model_whose_auto_class_has_several_is_loaded(name: str, tmp_path: Path) -> None:
    sizes = {"d_model": 8, "n_head": 2, "d_head": 4, "d_inner": 8, "block_sizes": [1, 1]}
    config = transformers.FunnelConfig(vocab_size=9, num_decoder_layers=1, **sizes)
    getattr(transformers, name)(config).save_pretrained(tmp_path)
    assert type(load_model(tmp_path)).__name__ == name


def test_other_heads_are_loaded_with_the_same_positions(tmp_path: Path) -> None:
    model, inputs = make_model(), make_inputs(MODELS["llama"])
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        states = model.model(**inputs).last_hidden_state
        for auto in (AutoModel, transformers.AutoModelForSequenceClassification):
            loaded = auto.from_pretrained(tmp_path)
            assert torch.equal(loaded.base_model(**inputs).last_hidden_state, states)
            assert read_positions(loaded) == "learned+m4m"
            assert loaded.config.name_or_path == str(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).model_type == "llama"


@pytest.mark.parametrize("tied", [True, False])
def test_half_precision_and_tied_weights_are_kept(tied: bool, tmp_path: Path) -> None:
    model = make_model(tie_word_embeddings=tied).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    settings = {"dtype": "auto", "output_loading_info": True}
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, **settings)
    assert loaded.dtype == torch.bfloat16
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    inputs = make_inputs(MODELS["llama"])
    assert torch.equal(compute_logits(loaded, inputs), compute_logits(model, inputs))


# Run where the package is not installed, on folders of models and stock configurations.
STRANGER = """
import sys
class Absent:
    def find_spec(self, name, *others):
        if name.partition(".")[0] == "fairseq_posenc":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
import accelerate, transformers
from pathlib import Path
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, pipeline
auto, onto = AutoModelForCausalLM.from_pretrained, accelerate.load_checkpoint_and_dispatch
for folder, name, config_name in zip(*[iter(sys.argv[1:])] * 3):
    model, config = getattr(transformers, name), getattr(transformers, config_name)
    stock = config.from_pretrained(folder, attn_implementation="eager")
    base = type(model(stock).base_model)
    weights = {}
    for part in Path(folder).glob("*.safetensors"):
        weights |= load_file(part)
    quoting = {
        "config": lambda: AutoConfig.from_pretrained(folder, trust_remote_code=False),
        "auto": lambda: auto(folder, trust_remote_code=False),
        "auto, trusted": lambda: auto(folder, trust_remote_code=True),
        "class": lambda: model.from_pretrained(folder),
        "class, resized": lambda: model.from_pretrained(folder, ignore_mismatched_sizes=True),
        "base class": lambda: base.from_pretrained(folder),
    }
    others = {
        "class, its configuration": lambda: model.from_pretrained(folder, config=stock),
        "class, its attention": lambda: model.from_pretrained(folder, attn_implementation="eager"),
        "base class, its configuration": lambda: base.from_pretrained(folder, config=stock),
        "weights": lambda: model(stock).load_state_dict(weights),
        "weights, not strictly": lambda: model(stock).load_state_dict(weights, strict=False),
        "accelerate": lambda: accelerate.load_checkpoint_in_model(model(stock), folder),
        "accelerate, onto a device": lambda: onto(model(stock), folder, device_map={"": "cpu"}),
    }
    for way, load in (quoting | others).items():
        try:
            load()
        except (ValueError, OSError, RuntimeError, ImportError) as error:
            assert way in others or "fairseq" in str(error), (name, way, error)
        else:
            raise AssertionError(f"{name}: {way} loads")
"""


@pytest.mark.slow
def test_nothing_reads_a_folder_as_the_stock_model(tmp_path: Path) -> None:
    words: list[str] = []
    for name, size in {"llama": "20KB", "gpt2": "5GB", "opt": "20KB"}.items():
        make_model(name, "alibi").save_pretrained(tmp_path / name, max_shard_size=size)
        words += [str(tmp_path / name), MODELS[name].model, MODELS[name].config]
    run("python", "-c", STRANGER, *words)


@pytest.mark.slow
def test_a_folder_is_loaded_by_trust_without_an_import(tmp_path: Path) -> None:
    model, inputs = make_model(), make_inputs(MODELS["llama"])
    model.save_pretrained(tmp_path)
    torch.save((inputs, compute_logits(model, inputs)), tmp_path / "expected")
    code = """
import sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True).eval()
inputs, logits = torch.load(f"{sys.argv[1]}/expected")
with torch.no_grad():
    assert torch.equal(model(**inputs).logits, logits)
"""
    run("python", "-c", code, tmp_path)


@pytest.mark.parametrize("kind", ["llama", "mixtral", "gte", "molmo2_text"])
def test_the_names_in_a_file_are_those_of_the_model(kind: str, tmp_path: Path) -> None:
    """Also where stock files have the weights of experts apart, or of queries and keys joined."""
    model, inputs = build(kind)
    names = model.state_dict().keys()
    set_positions(model, "alibi").save_pretrained(tmp_path / "once")
    loaded, logits = load_model(tmp_path / "once"), compute_logits(model, inputs)
    assert torch.equal(compute_logits(loaded, inputs), logits)
    loaded.save_pretrained(tmp_path / "again")
    given = {"config": model.config, "state_dict": model.state_dict()}
    assert torch.equal(compute_logits(type(model).from_pretrained(None, **given), inputs), logits)
    once, again = (load_file(tmp_path / x / "model.safetensors").keys() for x in ("once", "again"))
    (added,) = once - names
    assert once == again
    assert added.removesuffix(SUFFIXED.removeprefix(QUERIES)) in names


def test_a_changed_default_changes_no_saved_model(tmp_path, monkeypatch):
    model, inputs = make_model(spec="t5+window"), make_inputs(MODELS["llama"], length=40)
    model.save_pretrained(tmp_path)
    monkeypatch.setitem(Window.__init__.__kwdefaults__ or {}, "size", 3)
    monkeypatch.setitem(T5.__init__.__kwdefaults__ or {}, "num_buckets", 8)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert read_positions(loaded) == "t5(num_buckets=32)+window(size=512)"
    assert torch.equal(compute_logits(loaded, inputs), compute_logits(model, inputs))


TABLE = "model.positions.input.learned.table.weight"
SPEC, ROOM, TYPE = "position_encoding", "position_encoding_max_positions", "base_model_type"
UNSET = "the weights are of a model whose positions were not set"
OTHER = r"weights trained with learned\+m4m, the model has learned\+"
UNFIT: dict[str, tuple[Any, str]] = {  # a change of settings or weights, and what refuses it
    "another spec": ({SPEC: "learned+alibi"}, f"{OTHER}alibi: .* or restore config.json"),
    "another spec without weights": ({SPEC: "learned+m4m+window"}, rf"{OTHER}m4m\+window"),
    "no spec": ({SPEC: None}, "config.json: position_encoding must be a spec, not None"),
    "no length": ({ROOM: "64"}, "max_positions must be a whole number of at least 1, not '64'"),
    "rotations": ({"rope_parameters": {"rope_theta": 9}}, "rope_theta was 10000.0: restore"),
    "windows": ({"layer_types": ["sliding_attention"] * 4}, r"layer_types was \['full.*: restore"),
    "a list": ({f"{SPEC}_replaced": [1]}, "restore the dictionary .*_replaced$"),
    "an unknown encoding": ({SPEC: "owl"}, "unknown position encoding 'owl'"),
    "an unknown model": ({TYPE: "lama"}, "config.json: transformers has no type 'lama'"),
    "a longer table": ({ROOM: 99}, "the weights have other shapes of .*table.weight"),
    "a missing table": (lambda x: x.pop(TABLE), "the weights lack .*table.weight"),
    "weights of the stock model": (lambda x: x.update({QUERIES: x.pop(SUFFIXED)}), UNSET),
    "no record": (lambda x: x.pop(QUERIES), "weights lack model.positions._extra_state"),
}


@pytest.mark.parametrize("problem", UNFIT)
def test_a_folder_that_does_not_fit_is_refused_in_a_line(problem: str, tmp_path: Path) -> None:
    change, message = UNFIT[problem]
    make_model("gemma3" if problem == "windows" else "llama").save_pretrained(tmp_path)
    if isinstance(change, dict):
        edit_config(tmp_path, **change)
    else:
        edit_weights(tmp_path, change)
    with pytest.raises(UserError, match=message) as error:
        AutoModelForCausalLM.from_pretrained(tmp_path)
    assert "\n" not in str(error.value)


def test_a_model_without_some_of_its_layers_is_loaded(tmp_path: Path) -> None:
    model, inputs = make_model("gemma3", "alibi"), make_inputs(MODELS["gemma3"])
    model.config.update({"num_hidden_layers": 2, "layer_types": model.config.layer_types[::2][:2]})
    model.model.layers = model.model.layers[::2][:2]
    for index, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = index
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert len(loaded.model.layers) == 2
    assert torch.equal(compute_logits(loaded, inputs), compute_logits(model, inputs))


@pytest.mark.parametrize("kind", [transformers.Qwen2Config, transformers.Qwen2MoeConfig])
def test_a_qwen_that_forgets_the_size_of_its_windows_is_loaded(kind: type, tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_key_value_heads": 32}
    config = kind(**sizes, use_sliding_window=True, max_window_layers=0)
    set_positions(AutoModelForCausalLM.from_config(config), "rope").save_pretrained(tmp_path)
    assert read_positions(AutoModelForCausalLM.from_pretrained(tmp_path)) == "rope"


def test_a_distributed_checkpoint_which_has_no_record_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="distributed_checkpoint=True does not record positions"):
        make_model().save_pretrained(tmp_path, distributed_checkpoint=True)


def test_weights_of_other_positions_are_refused_without_strictness() -> None:
    """As transformers' Trainer loads a checkpoint into a model."""
    model = make_model("llama", "alibi")
    with pytest.raises(UserError, match=r"positions were not set, and the model has alibi"):
        model.load_state_dict(MODELS["llama"].build(seed=2).state_dict(), strict=False)
    with pytest.raises(UserError, match="trained with t5, the model has alibi"):
        model.load_state_dict(make_model("llama", "t5").state_dict(), strict=False)
    part = {"model.norm.weight": torch.full((32,), 2.0)}  # such as an adapter
    model.load_state_dict(part, strict=False)
    assert bool(model.model.norm.weight.eq(2).all())


LLAMA3 = {**TRAINED, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALINGS: dict[str, Any] = {"linear": {}, "dynamic": {}, "yarn": TRAINED, "llama3": LLAMA3}


@pytest.mark.parametrize("kind", SCALINGS)
def test_scaled_rotations_give_the_logits_of_the_model(kind: str) -> None:
    stock = MODELS["llama"].build(rope_scaling={"rope_type": kind, "factor": 4.0, **SCALINGS[kind]})
    inputs = make_inputs(MODELS["llama"], length=40)
    logits = compute_logits(stock, inputs)
    for room in (64, 256):  # room for more tokens does not change what the model computes
        model = set_positions(copy.deepcopy(stock), "own", max_positions=room)
        assert distance(compute_logits(model, inputs), logits) < 1e-5
    plain = MODELS["llama"].build()
    inputs = make_inputs(MODELS["llama"], length=100)  # beyond 64, where `dynamic` begins
    scaled = set_positions(MODELS["llama"].build(), f"own(scaling={kind}:4)", max_positions=256)
    assert distance(compute_logits(scaled, inputs), compute_logits(plain, inputs)) > 1e-3


def train(folder: Path, spec: str | None, steps: int, checkpoint: Path | None = None) -> Any:
    """Train a model by transformers' Trainer, perhaps from a checkpoint on."""
    torch.manual_seed(0)
    samples = [{"input_ids": ids, "labels": ids} for ids in torch.randint(3, 97, (32, 12))]
    model = MODELS["llama"].build()
    if spec is not None:
        set_positions(model, spec)
    alone: dict[str, Any] = {"use_cpu": True, "report_to": [], "disable_tqdm": True}
    settings = transformers.TrainingArguments(
        str(folder), max_steps=steps, save_steps=2, per_device_train_batch_size=4, **alone
    )
    trainer = transformers.Trainer(model, settings, train_dataset=samples)
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    return model


@pytest.fixture
def _torch_alone() -> Iterator[None]:
    """Take back what the plugin for fairseq, loaded by other tests, lets torch load.

    Its numbers of numpy are not those of the random states that transformers' Trainer saves.
    """
    allowed = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    yield
    torch.serialization.add_safe_globals(allowed)


@pytest.mark.usefixtures("_torch_alone")
def test_a_trainer_resumes_the_same_positions_alone(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", "learned+m4m", 4)
    checkpoint = tmp_path / "whole" / "checkpoint-2"
    resumed = train(tmp_path / "resumed", "learned+m4m", 4, checkpoint)
    for name, weight in whole.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], weight), name
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "resumed" / "checkpoint-4")
    assert torch.equal(loaded.lm_head.weight, whole.lm_head.weight)
    for other in ("alibi", "learned+m4m+window(size=4)"):
        with pytest.raises(UserError, match=r"trained with learned\+m4m, the model has"):
            train(tmp_path / "other", other, 4, checkpoint)
    with pytest.raises(RuntimeError, match="size mismatch"):  # a script without set_positions
        train(tmp_path / "other", None, 4, checkpoint)
