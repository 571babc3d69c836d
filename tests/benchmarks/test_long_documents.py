"""``benchmarks/long_documents.py`` finds the documents of passages, cut off or with longer tables.

Encoders need transformers 5; here a causal model makes the vectors.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModel, AutoTokenizer, LlamaConfig, LlamaModel

from fairseq_posenc.errors import UserError
from fairseq_posenc.hf import set_positions
from fairseq_posenc.workbench.results.record import read
from tests.helpers.hf_models import redraw, save_tokenizer

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import long_documents

WORDS = ["a", "cat", "sat", "on", "the", "mat", "and", "saw", "two", "dogs", "run"]
LENGTH = 128


@pytest.fixture
def place(tmp_path):
    """Make a folder with a text and a tiny model that reads half a document."""
    chance = random.Random(0)
    (tmp_path / "text.txt").write_text(" ".join(chance.choices(WORDS, k=6 * LENGTH + 7)))
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4}
    model = LlamaModel(LlamaConfig(len(WORDS) + 2, num_hidden_layers=2, **sizes))
    set_positions(model, "learned", LENGTH // 2 + 2)
    redraw(model)
    model.save_pretrained(tmp_path / "model")
    save_tokenizer(tmp_path / "model", WORDS)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    tokenizer.cls_token = tokenizer.sep_token = tokenizer.unk_token
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path


def run(place, monkeypatch, documents=6):
    words = [place / "model", "--text", place / "text.txt", "--length", LENGTH]
    words += ["--documents", documents, "--out", place / "long.json"]
    monkeypatch.setattr(sys, "argv", ["long_documents.py", *map(str, words)])
    long_documents.main()
    return read(place / "long.json")


def test_shares_are_those_of_one_passage_after_another(place, monkeypatch):
    rows = {row["model"]: row for row in run(place, monkeypatch).rows}
    assert [*rows] == ["cut off", "copy", "interpolate"]
    tokenizer = AutoTokenizer.from_pretrained(place / "model")
    tokens = tokenizer((place / "text.txt").read_text(), add_special_tokens=False)["input_ids"]
    documents = [
        tokens[n * (len(tokens) - LENGTH) // 5 : n * (len(tokens) - LENGTH) // 5 + LENGTH]
        for n in range(6)
    ]
    model = AutoModel.from_pretrained(place / "model").eval()

    def vector(text):
        enclosed = torch.tensor([[tokenizer.cls_token_id, *text, tokenizer.sep_token_id]])
        with torch.no_grad():
            mean = model(input_ids=enclosed).last_hidden_state[0].mean(0)
        return mean / mean.norm()

    for name, room in (("cut off", LENGTH // 2), ("copy", LENGTH)):
        if name == "copy":
            set_positions(model, "own", LENGTH + 2, extend="copy")
        vectors = [vector(document[:room]) for document in documents]
        for half, begin in (("first_half", LENGTH // 4), ("second_half", 3 * LENGTH // 4)):
            found = 0
            for number, document in enumerate(documents):
                passage = vector(document[begin : begin + 64])
                products = [float(passage @ other) for other in vectors]
                found += products.index(max(products)) == number
            assert rows[name][half] == pytest.approx(found / len(documents))
    change = rows["copy"]["second_half"] - rows["cut off"]["second_half"]
    assert rows["copy"]["second_half_difference"] == pytest.approx(change)


def test_a_short_text_is_refused(place, monkeypatch):
    with pytest.raises(UserError, match="7 documents of 128 have 896: take fewer --documents"):
        run(place, monkeypatch, documents=7)
