"""Adapters of PEFT beside positions: trained, saved, merged, refused on other positions."""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from fairseq_posenc.errors import UserError
from fairseq_posenc.hf import set_positions
from tests.helpers.hf_models import MODELS, Cell, compute_logits, distance, position_parameters

peft = pytest.importorskip("peft", reason="needs PEFT")


@pytest.mark.parametrize("name", ["default", "my-adapter 2"])
def test_adapters_of_any_name_have_records(name: str, tmp_path: Path) -> None:
    base = Cell.build("llama", "alibi").model
    model = peft.get_peft_model(copy.deepcopy(base), peft.LoraConfig(r=2), adapter_name=name)
    model.save_pretrained(tmp_path)
    folder = tmp_path if name == "default" else tmp_path / name
    peft.PeftModel.from_pretrained(base, folder, adapter_name=name)
    with pytest.raises(UserError, match="weights trained with alibi, the model has t5"):
        peft.PeftModel.from_pretrained(set_positions(MODELS["llama"].build(), "t5"), folder)
    with pytest.raises(UserError, match=r"PeftModel\.from_pretrained"):
        base.load_adapter(str(folder))


KINDS = {
    "LoRA": peft.LoraConfig(r=2),
    "LoRA, with a task": peft.LoraConfig(r=2, task_type="CAUSAL_LM"),
    "IA3": peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[]),
    "LoHa": peft.LoHaConfig(target_modules=["q_proj"]),
    "AdaLoRA": peft.AdaLoraConfig(target_modules=["q_proj"], total_step=9),
    "VeRA": peft.VeraConfig(target_modules=["q_proj"]),
}
PROMPTS = {
    "prompt tuning": peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "prefix tuning": peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
}
OTHER = r"trained with alibi\+window, the model has t5"
NO_RECORD = "nothing shows which positions these weights were trained with; the model has"


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_have_records_in_their_configuration(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    base = Cell.build("llama", "alibi+window").model
    config = copy.deepcopy(KINDS[kind])
    peft.get_peft_model(copy.deepcopy(base), config).save_pretrained(tmp_path)
    assert not getattr(config, "exclude_modules", None)
    written = json.loads((tmp_path / "adapter_config.json").read_text())["auto_mapping"]
    full = "alibi(mode=symmetric,scale_factor=1,axes=1)+window(size=512,first=none,prefill=false)"
    assert written["position_encoding"] == full
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "You have passed")
        loaded = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path)
    loaded.load_adapter(tmp_path, "default", is_trainable=True)  # as a Trainer does that resumes
    loaded.load_adapter(tmp_path, "second")
    loaded.save_pretrained(tmp_path / "again")
    assert '"position_encoding": "alibi' in (tmp_path / "again/adapter_config.json").read_text()
    assert not caplog.records
    if kind != "VeRA":  # PEFT's configuration of it has no `exclude_modules`
        with pytest.warns(UserWarning, match=r"call fairseq_posenc\.hf\.set_positions first"):
            peft.PeftModel.from_pretrained(MODELS["llama"].build(), tmp_path)
    other = set_positions(MODELS["llama"].build(), "t5")
    with pytest.raises(UserError, match=OTHER):
        peft.PeftModel.from_pretrained(copy.deepcopy(other), tmp_path)
    resumed = peft.get_peft_model(other, copy.deepcopy(KINDS[kind]))
    with pytest.raises(UserError, match=OTHER):
        resumed.load_adapter(tmp_path, "second")
    resumed.save_pretrained(tmp_path / "before")  # shows nothing of what is loaded next
    resumed.load_adapter(tmp_path, "default", is_trainable=True)  # PEFT does not read its file
    assert f"{NO_RECORD} t5" in caplog.text


@pytest.mark.parametrize("copied", [False, True])
def test_a_configuration_serves_a_stock_model_next(copied: bool, tmp_path: Path) -> None:
    config = peft.LoraConfig(task_type="CAUSAL_LM")
    peft.get_peft_model(Cell.build("llama", "alibi").model, config).save_pretrained(tmp_path)
    config = copy.deepcopy(config) if copied else config
    peft.get_peft_model(MODELS["llama"].build(), config).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (written["auto_mapping"], written["exclude_modules"]) == (None, None)


def test_adapters_do_not_name_the_folder_of_the_stock_model() -> None:
    model = MODELS["llama"].build()
    model.name_or_path = "stock"
    adapted = peft.get_peft_model(set_positions(model, "alibi"), peft.LoraConfig())
    assert not adapted.peft_config["default"].base_model_name_or_path


@pytest.mark.parametrize("kind", KINDS | PROMPTS)
def test_adapters_that_contain_positions_are_compared_wherever_they_load(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    base = Cell.build("llama", "alibi+window").model
    config = copy.deepcopy((KINDS | PROMPTS)[kind])
    config.modules_to_save = ["positions"]
    peft.get_peft_model(copy.deepcopy(base), copy.deepcopy(config)).save_pretrained(tmp_path)
    peft.PeftModel.from_pretrained(base, tmp_path)
    assert not caplog.records
    other = set_positions(MODELS["llama"].build(), "none")
    with pytest.raises(UserError, match=r"with alibi\+window, the model has none"):
        peft.PeftModel.from_pretrained(copy.deepcopy(other), tmp_path)
    resumed = peft.get_peft_model(other, config)
    with pytest.raises(UserError, match=r"with alibi\+window, the model has none"):
        resumed.load_adapter(tmp_path, "default", is_trainable=True)


@pytest.mark.parametrize("kind", PROMPTS)
def test_prompts_without_positions_are_named_when_they_load(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    base = Cell.build("llama", "alibi").model
    peft.get_peft_model(copy.deepcopy(base), PROMPTS[kind]).save_pretrained(tmp_path)
    assert not caplog.records
    peft.PeftModel.from_pretrained(base, tmp_path)
    assert f"{NO_RECORD} alibi" in caplog.text


@pytest.mark.parametrize("spec", ["learned+m4m", "t5+alibi+sink"])
def test_positions_are_trained_with_an_adapter_and_saved_in_it(spec: str, tmp_path: Path) -> None:
    cell = Cell.build("llama", spec)
    base, inputs = copy.deepcopy(cell.model), cell.inputs
    model = peft.get_peft_model(
        cell.model, peft.LoraConfig(r=2, modules_to_save=["positions"], init_lora_weights=False)
    )
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    names = [name.replace("modules_to_save.default.", "") for name in trained]
    expected = [f"base_model.model.{name}" for name in position_parameters(base)]
    assert sorted(name for name in names if ".positions." in name) == sorted(expected)
    before = {name: parameter.detach().clone() for name, parameter in trained.items()}
    optimizer = torch.optim.SGD(trained.values(), lr=1.0)
    model(**inputs, labels=inputs["input_ids"]).loss.backward()
    optimizer.step()
    assert not [name for name, weight in before.items() if torch.equal(weight, trained[name])]
    logits = compute_logits(model, inputs)
    with model.disable_adapter():
        assert torch.equal(compute_logits(model, inputs), compute_logits(base, inputs))
    model.save_pretrained(tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "adapter")
    assert torch.equal(compute_logits(again, inputs), logits)
    merged = again.merge_and_unload()
    assert distance(compute_logits(merged, inputs), logits) < 1e-5  # rounded otherwise
    merged.save_pretrained(tmp_path / "merged")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert torch.equal(compute_logits(loaded, inputs), compute_logits(merged, inputs))
    set_positions(merged, "t5")  # adapters are gone
    with pytest.raises(UserError, match=r"weights trained with .*, the model has alibi"):
        peft.PeftModel.from_pretrained(
            set_positions(MODELS["llama"].build(), "alibi"), tmp_path / "adapter"
        )


def test_positions_of_a_model_with_adapters_are_not_set() -> None:
    cell = Cell.build("llama", "alibi")
    model = peft.get_peft_model(cell.model, peft.LoraConfig(r=2, modules_to_save=["positions"]))
    logits = compute_logits(model, cell.inputs)
    with pytest.raises(UserError, match=r"PeftModel.* is not a transformers model"):
        set_positions(model, "t5")
    with pytest.raises(UserError, match="before adapters of PEFT, or after merge"):
        set_positions(model.get_base_model(), "t5")
    assert torch.equal(compute_logits(model, cell.inputs), logits)
    set_positions(model.unload(), "t5")


def test_an_adapter_of_a_stock_model_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stock = MODELS["llama"].build()
    peft.get_peft_model(stock, peft.LoraConfig(r=2)).save_pretrained(tmp_path / "stock")
    cell = Cell.build("llama", "alibi")
    trained = peft.get_peft_model(copy.deepcopy(cell.model), peft.LoraConfig(r=2))
    trained.save_pretrained(tmp_path / "trained")
    peft.PeftModel.from_pretrained(copy.deepcopy(cell.model), tmp_path / "trained")
    assert NO_RECORD not in caplog.text
    peft.PeftModel.from_pretrained(copy.deepcopy(cell.model), tmp_path / "stock")
    assert f"{NO_RECORD} alibi" in caplog.text


def test_an_adapter_that_leaves_out_positions_says_so(tmp_path: Path) -> None:
    base, lora = Cell.build("llama", "t5").model, peft.LoraConfig(r=2)
    with pytest.warns(UserWarning, match=r"does not contain .* such as .*positions\.shared\.t5"):
        peft.get_peft_model(copy.deepcopy(base), lora).save_pretrained(tmp_path)
    whole = peft.LoraConfig(r=2, modules_to_save=["positions"])
    base.save_pretrained(tmp_path / "base")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        peft.get_peft_model(copy.deepcopy(base), lora).save_pretrained(tmp_path)
        peft.get_peft_model(loaded, lora).save_pretrained(tmp_path)
        peft.get_peft_model(set_positions(base, "t5"), whole).save_pretrained(tmp_path)
