"""``benchmarks/needle.py`` hides pass keys, and asks for each by one reading of the text."""

from __future__ import annotations

import string
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from fairseq_posenc.workbench.experiments.length import hf_model
from fairseq_posenc.workbench.experiments.length.model import NamedModel
from fairseq_posenc.workbench.results.record import read
from fairseq_posenc.workbench.running.devices import CPU
from tests.helpers.hf_models import redraw

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import needle

LETTERS = [*string.printable]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Make a folder with a text and a tiny model, whose tokens are letters."""
    folder = tmp_path_factory.mktemp("needle")
    (folder / "text.txt").write_text("".join(f"line {n} of the text. " for n in range(200)))
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(len(LETTERS) + 1, num_hidden_layers=2, **sizes))
    redraw(model)
    model.save_pretrained(folder / "model")
    tokenizer = Tokenizer(models.WordLevel({c: n for n, c in enumerate(["<s>", *LETTERS])}))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")
    fast.save_pretrained(folder / "model")
    return folder


def hide(place, length, number=0):
    """Hide keys in a text; return the needles, and tokens as letters."""
    folder = place / "model"
    tokens = hf_model.tokenize_text(place / "text.txt", folder).targets
    needles = needle.hide(tokens, AutoTokenizer.from_pretrained(folder), length, number, texts=3)
    return needles, lambda ids: "".join(LETTERS[i - 1] for i in ids[0])


def test_keys_stand_at_their_depths_and_shorter_texts_are_the_ends_of_longer_ones(place):
    (short, letters), (long, _) = hide(place, 900), hide(place, 1500)
    assert (short.text.shape, long.text.shape) == ((1, 900), (1, 1500))
    assert letters(long.text).endswith(letters(short.text)[-40:])
    for needles in (short, long):
        text = letters(needles.text)
        for depth, question, answer in zip(needle.DEPTHS, needles.questions, needles.answers):
            city = letters(question).split()[7].rstrip("?")
            hidden = f"The secret pass key of {city} is{letters(answer)}."
            assert text.count(hidden) == 1
            assert text.index(hidden) / len(text) == pytest.approx(depth, abs=0.15)
    assert letters(short.answers[0]) == letters(long.answers[0])
    assert letters(short.answers[0]) != letters(hide(place, 900, number=1)[0].answers[0])


@pytest.mark.parametrize("spec", [None, "own(scaling=yarn:2)", "own+window(size=64,first=4)"])
def test_answers_are_those_of_the_whole_sequence_read_at_once(place, spec):
    loaded = hf_model.load(NamedModel("model", place / "model", spec), CPU, longest=1000)
    needles, _ = hide(place, 800)
    outputs = needle.ask(loaded, needles)
    for number, (question, answer) in enumerate(zip(needles.questions, needles.answers)):
        whole = torch.cat([needles.text, question, answer], 1)
        with torch.no_grad():
            logits = loaded.model(whole, use_cache=False).logits[0, -1 - answer.size(1) : -1]
        chosen = logits.log_softmax(-1)[torch.arange(answer.size(1)), answer[0]].sum()
        assert outputs["log_probability"][number] == pytest.approx(float(chosen), rel=1e-4)
        assert outputs["right"][number] == int(bool((logits.argmax(-1) == answer[0]).all()))


def test_a_key_that_greedy_decoding_gives_counts(place):
    loaded = hf_model.load(NamedModel("model", place / "model"), CPU, longest=1000)
    needles, _ = hide(place, 800)
    prompt = torch.cat([needles.text, needles.questions[2]], 1)
    size = needles.answers[2].size(1)
    written = loaded.model.generate(prompt, max_new_tokens=size, do_sample=False, pad_token_id=0)
    answers = [*needles.answers]
    answers[2] = written[:, prompt.size(1) :]
    assert needle.ask(loaded, needles._replace(answers=answers))["right"][2] == 1


def test_the_record_has_every_cell_and_a_second_call_asks_nothing_again(place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    given = ["needle.py", "own=model", "window=model@own+window(size=64,first=4)"]
    given += ["--text", "text.txt", "--lengths", "700,900", "--texts", "3", "--out", "out.json"]
    monkeypatch.setattr(sys, "argv", given)
    needle.main()
    record = read(place / "out.json")
    assert [(row["model"], row["length"], row["texts"]) for row in record.rows] == [
        ("own", 700, 3),
        ("window", 700, 3),
        ("own", 900, 3),
        ("window", 900, 3),
    ]
    assert (place / "out.png").stat().st_size > 5000
    answers = record.figures["answers"]
    assert len(answers) == 2 * 2 * 3 * len(needle.DEPTHS)
    assert {row["of"] for row in record.figures["depths"]} == {3}
    for row in record.rows:
        chosen = [
            a["right"]
            for a in answers
            if (a["model"], a["length"]) == (row["model"], row["length"])
        ]
        assert row["share"] == pytest.approx(sum(chosen) / len(chosen))

    def refuse(*others):
        raise AssertionError("asked again")

    monkeypatch.setattr(needle, "ask", refuse)
    needle.main()
    assert read(place / "out.json") == record
    capsys.readouterr()


def test_the_record_names_half_precision(place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    monkeypatch.setattr(needle.ComputeOptions, "choose", lambda *given: CPU)  # there is no GPU
    given = ["needle.py", "own=model", "--text", "text.txt", "--lengths", "700", "--texts", "1"]
    monkeypatch.setattr(sys, "argv", [*given, "--fp16", "--out", "half.json"])
    needle.main()
    assert read(place / "half.json").data["precision"] == "float16"
    capsys.readouterr()
