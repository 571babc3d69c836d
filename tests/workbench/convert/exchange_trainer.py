"""What a user of transformers trains: run by a Python that may know nothing of fairseq.

``python exchange_trainer.py ASKED ANSWERS``: both files are torch's. ASKED is a list of folders,
each with a dictionary, as for :func:`answer`.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers


@contextlib.contextmanager
def memory_of_nan() -> Iterator[None]:
    """Let all new memory hold NaN, as memory that was used before may."""
    assert torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def answer(folder: str, asked: dict[str, Any]) -> dict[str, Any]:
    """Load a model with what its file lacks drawn anew, train it, save it.

    Args:
        folder: of an export.
        asked: ``auto``, the name of an ``AutoModelFor...``; ``options`` of its ``from_pretrained``;
            ``batch``, what ``forward`` is given in training; ``symbols`` to resize embeddings to;
            ``out``, a folder to save it in; ``trainer``, whether transformers trains it.

    Returns:
        ``fresh``, the parameters that were drawn; ``loss`` before training; and after it, for the
        same inputs, ``scores``.
    """
    with memory_of_nan():
        model, info = getattr(transformers, asked["auto"]).from_pretrained(
            folder, trust_remote_code=True, output_loading_info=True, **asked.get("options", {})
        )
    found: dict[str, Any] = {"version": transformers.__version__}
    parameters = dict(model.named_parameters())
    found["fresh"] = {name: parameters[name].detach().clone() for name in info["missing_keys"]}
    if "symbols" in asked:
        model.resize_token_embeddings(asked["symbols"])
    batch = asked["batch"]
    found["loss"] = model.eval()(**batch).loss.item()
    train = _with_trainer if asked.get("trainer") else _by_hand
    train(model, batch, asked["out"])
    if Path(folder, "tokenizer.json").exists():
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
        tokenizer.save_pretrained(asked["out"])
    with torch.no_grad():
        output = model.eval()(**batch)
    found["scores"] = output.logits if "logits" in output else output.start_logits
    return found


def _by_hand(model: Any, batch: dict[str, torch.Tensor], out: str) -> None:
    model.gradient_checkpointing_enable()
    optimizer = torch.optim.SGD(model.train().parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
    model.save_pretrained(out)


def _with_trainer(model: Any, batch: dict[str, torch.Tensor], out: str) -> None:
    rows = [dict(zip(batch, row)) for row in zip(*batch.values())]
    options = transformers.TrainingArguments(
        out,
        max_steps=2,
        per_device_train_batch_size=len(rows),
        gradient_checkpointing=True,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = transformers.Trainer(model=model, args=options, train_dataset=rows)
    trainer.train()
    trainer.save_model(out)


if __name__ == "__main__":
    asked, answers = sys.argv[1:]
    torch.set_num_threads(1)
    torch.save([answer(folder, each) for folder, each in torch.load(asked)], answers)
