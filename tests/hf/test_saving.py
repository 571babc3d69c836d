"""Folders of models with positions: saved, loaded, and never read as the stock model."""

import copy
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from fairseq_posenc.hf import read_positions, set_positions
from tests.helpers.hf_models import (
    MODELS,
    SERVED,
    compute_logits,
    make_inputs,
    redraw_positions,
)
from tests.helpers.products import product_of

SPECS = ["none", "alibi", "learned+m4m", "2*rope+window(size=4),t5+sink", "own"]


def make_model(name: str = "llama", spec: str = "learned+m4m", **settings: Any) -> PreTrainedModel:
    model = set_positions(MODELS[name].build(**settings), spec)
    torch.manual_seed(3)
    redraw_positions(model)
    return model


def load(name: str, folder: Path, **settings: Any) -> PreTrainedModel:
    """Load a model of a name by the Auto class of its head."""
    head = MODELS[name].model
    auto = next(
        auto
        for part, auto in (
            ("Whisper", "AutoModelForSpeechSeq2Seq"),
            ("CausalLM", "AutoModelForCausalLM"),
            ("LMHead", "AutoModelForCausalLM"),
            ("MaskedLM", "AutoModelForMaskedLM"),
            ("ConditionalGeneration", "AutoModelForSeq2SeqLM"),
            ("MTModel", "AutoModelForSeq2SeqLM"),
        )
        if part in head
    )
    model: PreTrainedModel = getattr(transformers, auto).from_pretrained(folder, **settings)
    return model


@pytest.mark.parametrize(("name", "spec"), product_of(SERVED, SPECS))
def test_a_loaded_model_equals_the_saved_one(name: str, spec: str, tmp_path: Path) -> None:
    model, inputs = make_model(name, spec), make_inputs(MODELS[name])
    logits = compute_logits(model, inputs)
    model.save_pretrained(tmp_path / "once")
    loaded = load(name, tmp_path / "once")
    assert read_positions(loaded) == read_positions(model)
    assert type(loaded) is type(model)
    assert not loaded.training
    assert torch.equal(compute_logits(loaded, inputs), logits)
    loaded.save_pretrained(tmp_path / "again", max_shard_size="20KB")
    assert len(list((tmp_path / "again").glob("*.safetensors"))) > 1
    assert torch.equal(compute_logits(load(name, tmp_path / "again"), inputs), logits)


def test_other_heads_are_loaded_with_the_same_positions(tmp_path: Path) -> None:
    model, inputs = make_model(), make_inputs(MODELS["llama"])
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        states = model.model(**inputs).last_hidden_state
        for auto in (AutoModel, AutoModelForSequenceClassification):
            loaded = auto.from_pretrained(tmp_path)
            assert torch.equal(loaded.base_model(**inputs).last_hidden_state, states)
            assert read_positions(loaded) == "learned+m4m"
    assert AutoConfig.from_pretrained(tmp_path).model_type == "llama"


@pytest.mark.parametrize("tied", [True, False])
def test_half_precision_and_tied_weights_are_kept(tied: bool, tmp_path: Path) -> None:
    model = make_model(tie_word_embeddings=tied).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    loaded, info = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype="auto", output_loading_info=True
    )
    assert loaded.dtype == torch.bfloat16
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    inputs = make_inputs(MODELS["llama"])
    assert torch.equal(compute_logits(loaded, inputs), compute_logits(model, inputs))


def test_models_are_copied_and_pickled_with_their_positions(tmp_path: Path) -> None:
    model, inputs = make_model(), make_inputs(MODELS["llama"])
    logits = compute_logits(model, inputs)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert isinstance(again, LlamaForCausalLM)
        assert isinstance(again.config, LlamaConfig)
        assert torch.equal(compute_logits(again, inputs), logits)
    state = model.state_dict()
    other = set_positions(MODELS["llama"].build(seed=2), "learned+m4m")
    other.load_state_dict(state)
    assert torch.equal(compute_logits(other, inputs), logits)


# Run where the package is not imported, on the folder of a model and a stock configuration.
STRANGER = """
import sys
class Absent:
    def find_spec(self, name, *others):
        if name.partition(".")[0] == "fairseq_posenc":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
import torch, transformers
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, pipeline
folder, name, config_name = sys.argv[1:]
model, config = getattr(transformers, name), getattr(transformers, config_name)
stock = config.from_pretrained(folder)
ways = {
    "config": lambda: AutoConfig.from_pretrained(folder),
    "auto": lambda: AutoModelForCausalLM.from_pretrained(folder),
    "auto base": lambda: AutoModel.from_pretrained(folder),
    "pipeline": lambda: pipeline("text-generation", model=folder),
    "class": lambda: model.from_pretrained(folder),
    "class, resized": lambda: model.from_pretrained(folder, ignore_mismatched_sizes=True),
    "base class": lambda: model.base_model_class.from_pretrained(folder)
    if hasattr(model, "base_model_class") else model.from_pretrained(folder, config=stock),
}
for way, load in ways.items():
    try:
        load()
    except (ValueError, OSError) as error:
        assert "fairseq_posenc" in str(error), (way, error)
        print(way)
# Whoever drops what the configuration says gets no weights.
stock.transformers_weights = None
_, info = model.from_pretrained(folder, config=stock, output_loading_info=True)
assert not any("fairseq_posenc" not in key for key in info["unexpected_keys"]), info
names = {key for key in model(stock).state_dict()}
print(len(names - set(info["missing_keys"])) <= 1)
"""


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt"])
def test_nothing_reads_a_folder_as_the_stock_model(name: str, tmp_path: Path) -> None:
    make_model(name, "alibi").save_pretrained(tmp_path)
    arguments = [tmp_path, MODELS[name].model, MODELS[name].config]
    result = subprocess.run(
        [sys.executable, "-c", STRANGER, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    ways = ["config", "auto", "auto base", "pipeline", "class", "class, resized", "base class"]
    assert result.stdout.splitlines() == [*ways, "True"]
