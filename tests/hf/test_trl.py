"""TRL packs texts into rows, and trains a model on them document by document."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from fairseq_posenc.hf import set_positions
from tests.helpers.hf_models import MODELS, SYMBOLS, compute_logits, distance, save_tokenizer

trl = pytest.importorskip("trl", reason="needs TRL")
datasets = pytest.importorskip("datasets", reason="TRL needs datasets")


@pytest.mark.parametrize("spec", ["own", "alibi"])
def test_packed_texts_do_not_see_each_other(spec: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    words = [f"w{index}" for index in range(SYMBOLS - 2)]
    save_tokenizer(tmp_path / "tokenizer", words)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    tokenizer.pad_token = tokenizer.eos_token = tokenizer.bos_token
    texts = [
        " ".join(words[int(index)] for index in torch.randint(len(words), (int(length),)))
        for length in torch.randint(4, 14, (32,))
    ]
    settings = trl.SFTConfig(
        str(tmp_path / "run"),
        packing=True,
        max_length=32,
        max_steps=4,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        use_cpu=True,
        bf16=False,
        report_to=[],
        disable_tqdm=True,
    )
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
