"""``lm-length`` on folders of Hugging Face's transformers: perplexity by length, with any spec."""

from __future__ import annotations

import gc
import json
import math
import re
import shutil
import statistics
import subprocess
import sys
import weakref

import pytest
import torch
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers import PreTrainedTokenizerFast as Fast

from fairseq_posenc.hf import set_positions
from fairseq_posenc.workbench import cli
from fairseq_posenc.workbench.experiments.length import hf_model
from fairseq_posenc.workbench.results.record import read
from tests.helpers.hf_models import save_tokenizer

SENTENCE = "the cat sat on a mat and then the dog came in to see it . it ran away ."
WORDS = SENTENCE.split()
TEXT = " ".join(WORDS * 4)
SHORT = ["--lengths", "8", "--stride", "4"]


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=24, num_hidden_layers=2, max_position_embeddings=16, **sizes)
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():  # so that attention differs by position
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    save_tokenizer(folder, WORDS)
    return folder


@pytest.fixture
def measure(tmp_path, capsys):
    (tmp_path / "text.txt").write_text(TEXT)

    def call(*words, fails=False):
        text = ["--text", str(tmp_path / "text.txt"), "--out", str(tmp_path / "out")]
        code = cli.main(["lm-length", *text, *map(str, words)])
        said = capsys.readouterr()
        if fails:
            assert code == 2
            (line,) = [line for line in said.err.splitlines() if "error: " in line]
            return line.removeprefix("fairseq-posenc: error: ")
        assert code == 0
        rows = read(tmp_path / "out" / "lm-length.json").rows
        return {(row["model"], row["evaluation"], row["length"]): row for row in rows}

    return call


@torch.no_grad()
def by_hand(model, tokens: list[int], length: int, stride: int) -> float:
    """Return the perplexity, each token from a forward pass of its own, up to it."""
    inputs, loss = [0, *tokens[:-1]], 0.0
    for index, token in enumerate(tokens):
        start = max(0, index // stride * stride - (length - stride))
        logits = model(torch.tensor([inputs[start : index + 1]])).logits[0, -1]
        loss -= float(F.log_softmax(logits.double(), -1)[token])
    return math.exp(loss / len(tokens))


def test_perplexities_are_those_of_single_passes(llama, measure):
    """With the positions that the model has, and with others; also beyond its trained length."""
    tokens = Fast.from_pretrained(llama)(TEXT)["input_ids"]
    specs = {"plain": None, "yarn": "own(scaling=yarn:4)", "none": "none", "near": "alibi"}
    names = [f"{name}={llama}" + (f"@{spec}" if spec else "") for name, spec in specs.items()]
    rows = measure(*names, "--lengths", "8,24", "--stride", "6", "--max-tokens", "50")
    for (name, mode, length), row in rows.items():
        model = LlamaForCausalLM.from_pretrained(llama)
        if specs[name]:
            set_positions(model, specs[name], 24)
        stride = 6 if mode == "sliding" else length
        assert row["perplexity"] == pytest.approx(by_hand(model, tokens, length, stride), rel=1e-4)
        assert row["tokens"] == len(tokens)
    values = {row["perplexity"] for row in rows.values()}
    assert len(values) == len(rows), "each spec changes what the model predicts"


def test_a_model_with_positions_that_were_set_is_read_with_them(llama, measure, tmp_path):
    model = set_positions(LlamaForCausalLM.from_pretrained(llama), "alibi", 24)
    model.save_pretrained(tmp_path / "alibi")
    save_tokenizer(tmp_path / "alibi", WORDS)
    rows = measure(f"saved={tmp_path / 'alibi'}", f"set={llama}@alibi", *SHORT)
    for mode in ("sliding", "non-overlapping"):
        saved, given = (rows[name, mode, 8] for name in ("saved", "set"))
        assert saved["perplexity"] == given["perplexity"]
        assert saved["position_encoding"] == given["position_encoding"] == "alibi"


def test_a_table_ends_where_it_ends(measure, tmp_path):
    config = GPT2Config(vocab_size=24, n_positions=16, n_embd=32, n_layer=1, n_head=2)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    save_tokenizer(tmp_path / "gpt2", WORDS)
    rows = measure(f"gpt2={tmp_path / 'gpt2'}", "--lengths", "16,20", "--stride", "8")
    assert rows["gpt2", "sliding", 16]["perplexity"]
    assert rows["gpt2", "sliding", 20]["perplexity"] is None
    assert "limit of 16" in rows["gpt2", "sliding", 20]["refusal"]


def test_fairseq_is_not_needed(llama, tmp_path):
    program = (
        "import sys; sys.modules.update(dict.fromkeys(['fairseq', 'hydra', 'omegaconf'])); "
        "from fairseq_posenc.workbench import cli; sys.exit(cli.main(sys.argv[1:]))"
    )
    (tmp_path / "text.txt").write_text(TEXT)
    words = ["lm-length", f"a={llama}", "--text", "text.txt", *SHORT]
    subprocess.run([sys.executable, "-c", program, *words], cwd=tmp_path, check=True)


def test_mistakes_are_one_line(llama, measure, tmp_path, capsys):
    (tmp_path / "model.pt").touch()
    (tmp_path / "empty").mkdir()
    other = tmp_path / "other"
    LlamaForCausalLM.from_pretrained(llama).save_pretrained(other)
    assert "has no tokenizer" in measure(f"a={other}", *SHORT, fails=True)
    save_tokenizer(other, WORDS[:5])
    for models_, message in (
        ([f"a={llama}", f"b={other}"], "cut the text into other tokens"),
        ([f"a={llama}", f"b={tmp_path / 'model.pt'}"], "they read different data"),
        ([f"a={tmp_path / 'model.pt'}"], "checkpoints of fairseq read --data DIR"),
        ([f"a={tmp_path / 'empty'}"], "has no config.json"),
        ([f"a={llama}@own(limit=3)"], "limit"),
        ([f"a={llama}@rotary"], "unknown position encoding 'rotary'"),
        ([f"a={llama}", "--data", "bin"], "folders of transformers read --text FILE"),
        ([f"a={llama}", "--windows", "22"], "would predict the same tokens"),
    ):
        assert message in measure(*models_, *SHORT, fails=True)
    assert cli.main(["lm-length", f"a={llama}", *SHORT]) == 2
    assert "folders of transformers read --text FILE" in capsys.readouterr().err


def test_only_one_model_at_a_time_is_in_memory(llama, measure, monkeypatch):
    models, before = weakref.WeakSet(), []
    load = hf_model.load

    def count_and_load(*arguments):
        gc.collect()
        before.append(len(models))
        loaded = load(*arguments)
        models.add(loaded.model)
        return loaded

    monkeypatch.setattr(hf_model, "load", count_and_load)
    measure(f"own={llama}", f"none={llama}@none", *SHORT)
    assert before == [0] * 4


def test_spread_windows_predict_the_same_tokens_at_every_length(llama, measure, tmp_path):
    tokens = Fast.from_pretrained(llama)(TEXT)["input_ids"]
    names = [f"own={llama}", f"none={llama}@none"]
    rows = measure(*names, "--lengths", "8,24", "--stride", "4", "--windows", "5")
    model, inputs = LlamaForCausalLM.from_pretrained(llama), [0, *tokens[:-1]]
    ends = [24 + (len(tokens) - 24) * number // 4 for number in range(5)]
    for length in (8, 24):
        perplexities = []
        for end in ends:
            with torch.no_grad():
                logits = model(torch.tensor([inputs[end - length : end]])).logits[0, -4:]
            wanted = torch.tensor(tokens[end - 4 : end])
            perplexities.append(math.exp(F.cross_entropy(logits, wanted)))
        row = rows["own", "sliding", length]
        assert [row[f"window_{n}"] for n in range(1, 6)] == pytest.approx(perplexities, rel=1e-4)
        assert row["tokens"] == 20
        assert row["perplexity"] == pytest.approx(statistics.geometric_mean(perplexities), rel=1e-4)
    page = (tmp_path / "out" / "lm-length.md").read_text()
    assert "over 5 windows" in page
    assert re.search(
        r"none: its perplexity divided by that of own .* 8: [\d.]+ to [\d.]+; 24:", page
    )


def test_a_tokenizer_that_loses_blanks_is_refused(llama, measure, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(llama, other)
    path = other / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "decoder": {"type": "Fuse"}}))
    assert "reads its tokenizer wrongly" in measure(f"a={other}", *SHORT, fails=True)
