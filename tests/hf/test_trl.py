"""TRL packs texts into rows, and trains a model on them document by document."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from fairseq_posenc.hf import read_positions, set_positions
from tests.helpers.hf_models import MODELS, SYMBOLS, compute_logits, distance, save_tokenizer

trl = pytest.importorskip("trl", reason="needs TRL")
datasets = pytest.importorskip("datasets", reason="TRL needs datasets")


ALONE = {"use_cpu": True, "bf16": False, "report_to": [], "per_device_train_batch_size": 4}
WORDS = [f"w{index}" for index in range(SYMBOLS - 2)]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Any:
    save_tokenizer(tmp_path / "tokenizer", WORDS)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    tokenizer.pad_token = tokenizer.eos_token = tokenizer.bos_token
    return tokenizer


@pytest.mark.parametrize("spec", ["own", "alibi"])
def test_packed_texts_do_not_see_each_other(spec: str, tokenizer: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    texts = [
        " ".join(WORDS[int(index)] for index in torch.randint(len(WORDS), (int(length),)))
        for length in torch.randint(4, 14, (32,))
    ]
    packing = {"packing": True, "max_length": 32, "max_steps": 4, "learning_rate": 1e-2}
    settings = trl.SFTConfig(str(tmp_path / "run"), **packing, **ALONE)
    model = set_positions(MODELS["llama"].build(), f"{spec}+documents")
    trainer = trl.SFTTrainer(
        model,
        args=settings,
        train_dataset=datasets.Dataset.from_dict({"text": texts}),
        processing_class=tokenizer,
    )
    batch = next(iter(trainer.get_train_dataloader()))
    inputs = {name: batch[name] for name in ("input_ids", "position_ids")}
    starts = inputs["position_ids"][0].eq(0).nonzero().flatten().tolist()
    assert len(starts) > 4
    logits = compute_logits(trainer.model.eval(), inputs)
    for start, end in zip(starts, [*starts[1:], inputs["input_ids"].size(1)]):
        alone = compute_logits(trainer.model, {"input_ids": inputs["input_ids"][:, start:end]})
        assert distance(logits[:, start:end], alone) < 1e-5
    trainer.train()
    assert distance(compute_logits(model.eval(), inputs), logits) > 1e-3


@pytest.mark.parametrize("method", ["DPO", "KTO", "GRPO", "RLOO"])
def test_a_reference_model_has_the_positions_of_the_policy(
    method: str, tokenizer: Any, tmp_path: Path
) -> None:
    """Without ``ref_model``, TRL loads the reference from the name of the policy."""
    columns: dict[str, Any] = {
        "DPO": {"chosen": ["w3 w4", "w5"], "rejected": ["w5 w6", "w7"]},
        "KTO": {"completion": ["w3 w4", "w5 w6"], "label": [True, False]},
    }
    columns = {"prompt": ["w1 w2", "w2 w3"], **columns.get(method, {})}
    online = {"num_generations": 2, "max_completion_length": 4, "beta": 0.1}
    options = {"reward_funcs": lambda completions, **others: [1.0] * len(completions)}
    is_online = method in ("GRPO", "RLOO")

    def prepare(policy: PreTrainedModel) -> PreTrainedModel:
        settings = getattr(trl, f"{method}Config")(
            str(tmp_path / "run"), **ALONE, **(online if is_online else {})
        )
        trainer = getattr(trl, f"{method}Trainer")(
            policy,
            args=settings,
            train_dataset=datasets.Dataset.from_dict(columns),
            processing_class=tokenizer,
            **(options if is_online else {}),
        )
        reference: PreTrainedModel = trainer.ref_model
        return reference

    MODELS["llama"].build().save_pretrained(tmp_path / "stock")
    policy = set_positions(AutoModelForCausalLM.from_pretrained(tmp_path / "stock"), "t5")
    with pytest.raises(OSError, match="a model whose positions were set: save it and load it"):
        prepare(policy)
    policy.save_pretrained(tmp_path / "policy")
    policy = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    reference = prepare(policy)
    assert read_positions(reference) == "t5"
    inputs = {"input_ids": torch.randint(3, SYMBOLS, (1, 9))}
    logits = compute_logits(policy.eval(), inputs)
    assert torch.equal(compute_logits(reference.eval(), inputs), logits)
