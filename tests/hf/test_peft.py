"""Adapters of PEFT beside positions: trained, saved, merged, refused on other positions."""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import pickle
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from fairseq_posenc.errors import UserError
from fairseq_posenc.hf import set_positions
from tests.helpers.hf_models import MODELS, Cell, compute_logits, distance, position_parameters
from tests.helpers.products import product_of
from tests.hf.test_nested import build_llava

peft = pytest.importorskip("peft", reason="needs PEFT")
hotswap = pytest.importorskip("peft.utils.hotswap", reason="needs PEFT")


LAYERS: dict[str, Any] = {"target_modules": ["q_proj"]}
PROMPT: dict[str, Any] = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 3}
KINDS = {
    "LoRA": peft.LoraConfig(r=2),
    "LoRA, with a task": peft.LoraConfig(r=2, task_type="CAUSAL_LM"),
    "IA3": peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[]),
    "LoHa": peft.LoHaConfig(**LAYERS),
    "LoKr": peft.LoKrConfig(**LAYERS),
    "AdaLoRA": peft.AdaLoraConfig(**LAYERS, total_step=9),
    "OFT": peft.OFTConfig(**LAYERS, r=0, oft_block_size=4),
    "BOFT": peft.BOFTConfig(**LAYERS, boft_block_size=4),
    "VeRA": peft.VeraConfig(**LAYERS),
    "tokens": peft.TrainableTokensConfig(token_indices=[4, 5], target_modules=["embed_tokens"]),
    "prompt tuning": peft.PromptTuningConfig(**PROMPT),
    "prefix tuning": peft.PrefixTuningConfig(**PROMPT),
    "p-tuning": peft.PromptEncoderConfig(**PROMPT, encoder_hidden_size=8),
    "multitask prompts": peft.MultitaskPromptTuningConfig(**PROMPT, num_tasks=2),
}
NO_RECORD = "nothing shows which positions these weights were trained with; the model has"


def adapt(base: PreTrainedModel, kind: str, saved: list[str] | None = None, seed: int = 5) -> Any:
    """Give a copy of a model an adapter with weights that matter."""
    config = copy.deepcopy(KINDS[kind])
    config.modules_to_save = saved
    model = peft.get_peft_model(copy.deepcopy(base), config)
    torch.manual_seed(seed)
    for weight in filter(lambda x: x.requires_grad, model.parameters()):
        torch.nn.init.normal_(weight, std=0.3)
    return model.eval()


@pytest.mark.parametrize(
    ("kind", "name", "saved"),
    product_of(KINDS, [("second", None), ("default", None), ("default", ["positions"])]),
)
def test_adapters_are_compared_wherever_they_load(
    kind: str, name: str, saved: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cell = Cell.build("llama", "alibi+window")
    inputs = cell.inputs | ({"task_ids": torch.zeros(2).long()} if "multi" in kind else {})
    adapted = adapt(cell.model, kind, saved)
    logits = compute_logits(adapted, inputs)
    adapted.save_pretrained(tmp_path / "adapted")
    adapt(cell.model, kind, saved, seed=6).save_pretrained(tmp_path / "earlier")
    model = peft.PeftModel.from_pretrained(cell.model, tmp_path / "earlier")
    assert not torch.equal(compute_logits(model, inputs), logits)
    model.load_adapter(tmp_path / "adapted", name)
    model.set_adapter(name)
    assert torch.equal(compute_logits(model, inputs), logits)
    other = set_positions(MODELS["llama"].build(), "none")
    resumed = adapt(other, kind, saved)
    before = compute_logits(resumed, inputs)
    with pytest.raises(UserError, match=r"trained with alibi\+window, the model has none"):
        resumed.load_adapter(tmp_path / "adapted", name, is_trainable=name == "default")
    assert torch.equal(compute_logits(resumed, inputs), before)
    with pytest.raises(UserError, match=r"trained with alibi\+window, the model has none"):
        peft.PeftModel.from_pretrained(other, tmp_path / "adapted")
    assert not any(x.levelno > logging.INFO for x in caplog.records)


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_between_stock_models_and_others_are_named(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stock, base = MODELS["llama"].build(), Cell.build("llama", "alibi").model
    adapt(base, kind).save_pretrained(tmp_path, safe_serialization=kind != "LoHa")
    asks = pytest.warns(UserWarning, match=r"call fairseq_posenc\.hf\.set_positions first")
    with asks if hasattr(KINDS[kind], "exclude_modules") else contextlib.nullcontext():
        peft.PeftModel.from_pretrained(copy.deepcopy(stock), tmp_path)
    assert not any(x.levelno > logging.INFO for x in caplog.records)
    adapt(stock, kind).save_pretrained(tmp_path)
    peft.PeftModel.from_pretrained(base, tmp_path)
    assert f"{NO_RECORD} alibi" in caplog.text


@pytest.mark.filterwarnings("error:You have passed")
@pytest.mark.parametrize("name", ["default", "my-adapter 2", "0"])
def test_adapters_of_any_name_have_records(name: str, tmp_path: Path) -> None:
    base = Cell.build("llama", "alibi").model
    model = peft.get_peft_model(copy.deepcopy(base), peft.LoraConfig(r=2), adapter_name=name)
    model.save_pretrained(tmp_path, state_dict=dict(model.named_parameters()))
    folder = tmp_path if name == "default" else tmp_path / name
    peft.PeftModel.from_pretrained(copy.deepcopy(base), folder, adapter_name=name)
    with pytest.raises(UserError, match="weights trained with alibi, the model has t5"):
        peft.PeftModel.from_pretrained(set_positions(MODELS["llama"].build(), "t5"), folder)
    with pytest.raises(UserError, match=r"PeftModel\.from_pretrained"):
        base.load_adapter(str(folder))


def test_hotswapped_adapters_are_refused(tmp_path: Path) -> None:
    cell = Cell.build("llama", "alibi")
    adapt(cell.model, "LoRA").save_pretrained(tmp_path)
    for model in (adapt(cell.model, "LoRA", seed=6), adapt(MODELS["llama"].build(), "LoRA")):
        before = compute_logits(model, cell.inputs)
        with pytest.raises(RuntimeError, match=r"unexpected keys found: .*\.positions_record\."):
            hotswap.hotswap_adapter(model, str(tmp_path), "default")
        assert torch.equal(compute_logits(model, cell.inputs), before)


def test_records_of_both_stacks_are_compared_before_weights_load(tmp_path: Path) -> None:
    base = set_positions(MODELS["bart"].build(), "alibi", decoder_spec="none")
    adapt(base, "LoRA").save_pretrained(tmp_path)
    model = adapt(set_positions(base, "alibi"), "LoRA")
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(UserError, match="weights trained with none, the model has alibi"):
        model.load_adapter(tmp_path, "default")
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


def test_adapters_of_a_model_around_one_with_positions_are_compared(tmp_path: Path) -> None:
    owner, part = build_llava()
    set_positions(part, "alibi")
    adapt(owner, "LoHa").save_pretrained(tmp_path)
    set_positions(part, "none")
    model = adapt(owner, "LoHa", seed=6)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(UserError, match="trained with alibi, the model has none"):
        model.load_adapter(tmp_path, "default")
    changed = {k for k, x in model.state_dict().items() if not torch.equal(x, before[k])}
    assert {"language_model" in name for name in changed} == {False}  # only of earlier parts


def test_the_record_does_not_change_what_peft_says_and_does(tmp_path: Path) -> None:
    cell = Cell.build("llama", "alibi")
    model = adapt(cell.model, "LoRA")
    model.save_pretrained(tmp_path)
    model.load_adapter(tmp_path, "second")
    model.set_adapter("second")
    status = model.get_model_status()
    assert (status.enabled, status.active_adapters) == (True, ["second"])
    with model.disable_adapter():
        assert model.get_model_status().enabled is False
    logits = compute_logits(model, cell.inputs)
    model.delete_adapter("default")
    again = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    assert torch.equal(compute_logits(again, cell.inputs), logits)
    with again.disable_adapter():
        expected = compute_logits(cell.model, cell.inputs)
        assert torch.equal(compute_logits(again, cell.inputs), expected)
    base = again.unload()
    assert torch.equal(compute_logits(base, cell.inputs), expected)
    assert base.state_dict().keys() == cell.model.state_dict().keys()
    adapt(base, "LoRA").save_pretrained(tmp_path)
    with pytest.raises(UserError, match="trained with alibi, the model has t5"):
        peft.PeftModel.from_pretrained(set_positions(base, "t5"), tmp_path)


def test_a_model_is_freed_at_once() -> None:
    model = adapt(Cell.build("llama", "alibi").model, "LoRA")
    model.state_dict()
    weight = weakref.ref(model.base_model.model)
    del model
    assert weight() is None  # without the garbage collector


@pytest.mark.parametrize("copied", [False, True])
def test_a_configuration_serves_a_stock_model_next(copied: bool, tmp_path: Path) -> None:
    config = peft.LoraConfig(task_type="CAUSAL_LM")
    model = peft.get_peft_model(Cell.build("llama", "alibi").model, config)
    model.save_pretrained(tmp_path)
    peft.get_peft_model_state_dict(model)  # saves nothing next
    config = copy.deepcopy(config) if copied else config
    peft.get_peft_model(MODELS["llama"].build(), config).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (written["auto_mapping"], written["exclude_modules"]) == (None, None)


def test_adapters_do_not_name_the_folder_of_the_stock_model() -> None:
    model = MODELS["llama"].build()
    model.name_or_path = "stock"
    adapted = peft.get_peft_model(set_positions(model, "alibi"), peft.LoraConfig())
    assert not adapted.peft_config["default"].base_model_name_or_path


@pytest.mark.parametrize("spec", ["learned+m4m", "t5+alibi+sink"])
def test_positions_are_trained_with_an_adapter_and_saved_in_it(spec: str, tmp_path: Path) -> None:
    cell = Cell.build("llama", spec)
    base, inputs = copy.deepcopy(cell.model), cell.inputs
    lora = peft.LoraConfig(r=2, modules_to_save=["positions"], init_lora_weights=False)
    model = peft.get_peft_model(cell.model, lora)
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


def test_an_adapter_that_leaves_out_positions_says_so(tmp_path: Path) -> None:
    base = Cell.build("llama", "t5").model
    with pytest.warns(UserWarning, match=r"does not contain .* such as .*positions\.shared\.t5"):
        adapt(base, "LoRA").save_pretrained(tmp_path)
    base.save_pretrained(tmp_path / "base")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        adapt(base, "LoRA").save_pretrained(tmp_path)
        adapt(loaded, "LoRA").save_pretrained(tmp_path)
        adapt(set_positions(base, "t5"), "LoRA", ["positions"]).save_pretrained(tmp_path)


def test_rows_that_a_layer_projects_are_not_mixed_by_adapter() -> None:
    model = adapt(set_positions(MODELS["llama"].build(), "deberta_v2"), "LoRA")
    ids = torch.randint(3, 50, (2, 5))
    with pytest.raises(UserError, match="adapter_names: these positions have rows that are proj"):
        model(ids, adapter_names=["default"] * 2)
