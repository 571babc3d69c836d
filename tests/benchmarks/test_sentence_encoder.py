"""``benchmarks/sentence_encoder.py`` measures vectors, and teaches them to other positions.

Encoders need transformers 5; here a causal model makes the vectors.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
import torch
from scipy import stats
from transformers import AutoModel, AutoTokenizer, LlamaConfig, LlamaModel

from fairseq_posenc.hf import set_positions
from fairseq_posenc.workbench.results.record import read
from tests.helpers.hf_models import redraw, save_tokenizer

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import sentence_encoder

WORDS = ["a", "cat", "sat", "on", "the", "mat", "and", "saw", "two", "dogs", "run"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Make a folder with files as GLUE's, and a tiny model."""
    folder = tmp_path_factory.mktemp("encoder")
    chance = random.Random(0)

    def sentence():
        return " ".join(chance.choices(WORDS, k=chance.randint(3, 9)))

    for name in ("sts", "train"):
        rows = [f'{sentence()}\t"{sentence()}\t{chance.random() * 5:.2f}' for _ in range(70)]
        table = "\n".join(["sentence1\tsentence2\tscore", *rows]) + "\n"
        (folder / f"{name}.tsv").write_text(table)
    labels = ["entailment", "not_entailment"]
    rows = [f"{sentence()}\t{sentence()}\t{labels[n % 2]}" for n in range(60)]
    (folder / "qnli.tsv").write_text("\n".join(["question\tsentence\tlabel", *rows]) + "\n")
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4}
    model = LlamaModel(LlamaConfig(len(WORDS) + 2, num_hidden_layers=2, **sizes))
    redraw(model)
    model.save_pretrained(folder / "model")
    save_tokenizer(folder / "model", WORDS)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    tokenizer.pad_token = tokenizer.unk_token
    tokenizer.save_pretrained(folder / "model")
    return folder


@pytest.fixture
def start(place, tmp_path, monkeypatch):
    """Return a function that measures some specs, and returns the record."""

    def call(*specs, updates, out="out.json", **changed):
        files = {"--sts": "sts.tsv", "--qnli": "qnli.tsv", "--distil": "train.tsv", **changed}
        given = ["sentence_encoder.py", str(place / "model"), "--specs", *specs]
        for option, name in files.items():
            given += [option, str(place / name)]
        given += ["--questions", "20", "--every", "4", "--lr", "0.01"]
        given += ["--updates", str(updates), "--out", str(tmp_path / out)]
        monkeypatch.setattr(sys, "argv", given)
        sentence_encoder.main()
        return read(tmp_path / out)

    return call


def test_figures_are_those_of_sentences_read_one_by_one(place, start):
    row = start("alibi", updates=0).rows[0]
    model = set_positions(AutoModel.from_pretrained(place / "model"), "alibi").eval()
    tokenizer = AutoTokenizer.from_pretrained(place / "model")

    @torch.no_grad()
    def encode(text):
        hidden = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
        return torch.nn.functional.normalize(hidden.mean(0), dim=0)

    pairs = [line.split("\t") for line in (place / "sts.tsv").read_text().splitlines()[1:]]
    cosines = [float(encode(first) @ encode(second)) for first, second, _ in pairs]
    wanted = stats.spearmanr(cosines, [float(score) for *_, score in pairs]).statistic
    assert row["spearman"] == pytest.approx(wanted, abs=1e-3)
    assert row["spearman_low"] < row["spearman"] < row["spearman_high"]
    asked = [line.split("\t") for line in (place / "qnli.tsv").read_text().splitlines()[1:]]
    asked = [line for line in asked if line[2] == "entailment"][:20]
    answers = torch.stack([encode(answer) for _, answer, _ in asked])
    right = [int((answers @ encode(q)).argmax()) == n for n, (q, _, _) in enumerate(asked)]
    assert row["recall"] == pytest.approx(sum(right) / 20)
    assert 0 <= row["recall_low"] <= row["recall"] <= row["recall_high"] <= 1


def test_other_positions_learn_the_vectors_again_and_a_longer_training_continues(start):
    short = start("own", "none", updates=4)
    long = start("own", "none", updates=8)
    first = [row["updates"] for row in long.figures["curves"] if row["model"] == "none"]
    assert first == [0, 4, 8]
    begun = [row for row in short.figures["curves"] if row["model"] == "none"]
    assert begun == [row for row in long.figures["curves"] if row["model"] == "none"][:2]
    whole = start("own", "none", updates=8, out="whole.json")
    assert whole.figures["curves"] == long.figures["curves"]


def test_a_missing_file_is_a_line(start, capsys):
    with pytest.raises(SystemExit):
        start("own", updates=0, **{"--sts": "nowhere.tsv"})
    assert capsys.readouterr().err.endswith("nowhere.tsv: no such file\n")
