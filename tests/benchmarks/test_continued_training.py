"""``benchmarks/continued_training.py`` trains a model on with other positions, and continues."""

from __future__ import annotations

import math
import random
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from fairseq_posenc.hf import read_positions, set_positions
from fairseq_posenc.workbench.experiments.length import hf_model
from fairseq_posenc.workbench.results.record import read
from tests.helpers.hf_models import redraw, save_tokenizer

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import continued_training
from measuring import trained_models

WORDS = ["a", "cat", "sat", "on", "the", "mat", "and", "saw", "two", "dogs", "run"]
LENGTH = 16


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Make a folder with two texts and a tiny model."""
    folder = tmp_path_factory.mktemp("continued")
    chance = random.Random(0)
    for name in ("train", "valid"):
        # The same word stands every third time, so that there is something to learn.
        words = [word for _ in range(200) for word in ("the", *chance.choices(WORDS, k=2))]
        (folder / f"{name}.txt").write_text(" ".join(words))
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(len(WORDS) + 2, num_hidden_layers=2, **sizes))
    redraw(model)
    model.save_pretrained(folder / "model")
    save_tokenizer(folder / "model", WORDS)
    return folder


@pytest.fixture
def start(place, tmp_path, monkeypatch):
    """Return a function that trains with some specs, and returns the record."""

    def call(*specs, updates, out="out.json"):
        given = ["continued_training.py", str(place / "model"), "--specs", *specs]
        given += ["--train", str(place / "train.txt"), "--valid", str(place / "valid.txt")]
        given += ["--length", str(LENGTH), "--blocks", "4", "--every", "4", "--lr", "0.01"]
        given += ["--updates", str(updates), "--out", str(tmp_path / out)]
        monkeypatch.setattr(sys, "argv", given)
        continued_training.main()
        return read(tmp_path / out)

    return call


def test_perplexity_before_training_is_that_of_the_model_with_other_positions(
    place, start, tmp_path
):
    record = start("own", "none", updates=4)
    curves = record.figures["curves"]
    assert [(row["model"], row["updates"]) for row in curves] == [
        ("own", 0),
        ("own", 4),
        ("none", 0),
        ("none", 4),
    ]
    assert (tmp_path / "out.png").stat().st_size > 5000
    stream = hf_model.tokenize_text(place / "valid.txt", place / "model")
    for row in curves:
        if row["updates"]:
            continue
        model = AutoModelForCausalLM.from_pretrained(place / "model")
        set_positions(model, row["model"]).eval()
        inputs, targets = stream.inputs[None, :LENGTH], stream.targets[:LENGTH]
        with torch.no_grad():
            loss = torch.nn.functional.cross_entropy(model(inputs).logits[0], targets)
        assert row["loss_1"] == pytest.approx(float(loss), rel=1e-4)
    first, *_, last = curves
    assert first["ratio"] == 1
    losses = [row["loss"] for row in record.figures["training"] if row["model"] == "own"]
    assert len(losses) == 4
    assert record.rows[0]["perplexity"] == curves[1]["perplexity"] < curves[0]["perplexity"]
    assert last["ratio"] == pytest.approx(last["perplexity"] / curves[1]["perplexity"])


def test_a_longer_training_continues_a_shorter_one_and_equals_one_in_a_go(start, tmp_path):
    start("t5", updates=6, out="parts.json")
    parts = start("t5", updates=12, out="parts.json")
    whole = start("t5", updates=12, out="whole.json")
    assert parts.figures["training"] == whole.figures["training"]
    assert len(whole.figures["training"]) == 12
    ends = [record.figures["curves"][-1] for record in (parts, whole)]
    assert ends[0] == ends[1]
    assert parts.rows[0]["new_parameters"] == whole.rows[0]["new_parameters"] > 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "parts" / "t5" / "model")
    assert read_positions(model) == "t5"


def test_models_are_compared_at_the_same_updates(start):
    """The first one was prolonged, and so has an evaluation that the other lacks."""
    start("t5", updates=6)
    record = start("t5", "none", updates=12)
    found = {(row["model"], row["updates"]): row for row in record.figures["curves"]}
    assert [updates for name, updates in found if name == "t5"] == [0, 4, 6, 8, 12]
    assert [updates for name, updates in found if name == "none"] == [0, 4, 8, 12]
    for (_, updates), row in found.items():
        ratio = row["perplexity"] / found["t5", updates]["perplexity"]
        assert row["ratio"] == pytest.approx(ratio)
    assert record.rows[1]["updates"] == 12


def test_another_model_in_the_same_folder_has_other_weights(tmp_path):
    found = []
    for content in (b"one", b"other"):
        (tmp_path / "pytorch_model.bin").write_bytes(content)
        trained_models.checksum_weights.cache_clear()
        found.append(trained_models.checksum_weights(tmp_path))
    assert found[0] != found[1]
    (tmp_path / "model.safetensors").write_bytes(b"one")
    trained_models.checksum_weights.cache_clear()
    assert trained_models.checksum_weights(tmp_path) == found[0]


def test_a_stopped_training_continues_from_its_last_evaluation(start, monkeypatch):
    whole = start("own", updates=10, out="whole.json")
    forward, calls = LlamaForCausalLM.forward, []

    def stop(self, *given, **named):
        calls.append(self.training)
        if sum(calls) > 6:
            raise KeyboardInterrupt
        return forward(self, *given, **named)

    with monkeypatch.context() as patch:
        patch.setattr(LlamaForCausalLM, "forward", stop)
        with pytest.raises(KeyboardInterrupt):
            start("own", updates=10)
    calls.clear()
    again = start("own", updates=10)
    assert again.figures["training"] == whole.figures["training"]
    assert again.figures["curves"] == whole.figures["curves"]


def test_a_folder_is_named_after_its_spec():
    names = map(trained_models.name_folder, ("own", "3*own,none", "own+window(size=256,first=4)"))
    assert [*names] == ["own", "3-own-none", "own+window-size=256-first=4"]


def test_perplexities_are_read_from_losses():
    assert continued_training._compute_perplexities({"updates": 3, "loss_1": math.log(2)}) == {
        0: 2.0
    }
