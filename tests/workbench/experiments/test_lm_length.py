"""Perplexity by length: each token is scored once, with the context that the row says.

A window or a context off by one gives a plausible figure: only passes by hand find it.
"""

from __future__ import annotations

import gc
import json
import math
import re
import shutil
import statistics
import sys
import weakref

import pytest
import torch
from torch.nn import functional as F
from transformers import LlamaForCausalLM
from transformers import PreTrainedTokenizerFast as Fast

from fairseq_posenc.hf import set_positions
from fairseq_posenc.workbench.experiments.length import hf_model, report, scoring
from fairseq_posenc.workbench.experiments.length.hf_model import parse_models
from fairseq_posenc.workbench.experiments.length.scoring import batch_windows, cut_windows
from fairseq_posenc.workbench.results.record import read
from tests.helpers.commands import call, kill_command, refused
from tests.helpers.hf_models import MODELS, save_llama, save_tokenizer

SENTENCE = "the cat sat on a mat and then the dog came in to see it . it ran away ."
WORDS = SENTENCE.split()
TEXT = " ".join(WORDS * 4)
SHORT = ["--lengths", "8", "--stride", "4"]
SIZES = [(10, 4, 4), (10, 4, 1), (10, 4, 3), (12, 4, 2), (97, 16, 5), (5, 8, 8), (5, 8, 2)]


@pytest.mark.parametrize(("total", "length", "stride"), [*SIZES, (1, 1, 1)])
def test_tokens_are_scored_once_none_reads_too_much_and_batches_are_equal(total, length, stride):
    found = list(cut_windows(total, length, stride))
    assert [token for w in found for token in range(w.scored, w.end)] == list(range(total))
    assert all(0 < w.end - w.start <= length for w in found)
    for window in found:
        assert window.scored - window.start >= min(window.scored, length - stride)
    for limit in (20, 8):  # tokens; a longer window is a batch of its own
        batches = list(batch_windows(iter(found), limit))
        assert [window for batch in batches for window in batch] == found
        assert {len({(x.end - x.start, x.end - x.scored) for x in b}) for b in batches} == {1}
        assert all(len(x) == 1 or len(x) * (x[0].end - x[0].start) <= limit for x in batches)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    save_llama(folder, WORDS)
    return folder


@pytest.fixture
def measure(tmp_path, capsys):
    (tmp_path / "text.txt").write_text(TEXT)

    def run(*words, fails=False):
        words = ["lm-length", "--text", tmp_path / "text.txt", "--out", tmp_path / "out", *words]
        if fails:
            return refused(capsys, *words)
        (tmp_path / "printed").write_text("".join(call(capsys, *words)))
        rows = read(tmp_path / "out" / "lm-length.json").figures["perplexity"]
        return {(row["model"], row["length"]): row for row in rows}

    return run


@torch.no_grad()
def by_hand(model, tokens: list[int], starts: dict[int, int]) -> float:
    """Return the perplexity of tokens, by index, each from a pass of its own, from its start."""
    inputs, loss = [0, *tokens[:-1]], 0.0
    for index, start in starts.items():
        logits = model(torch.tensor([inputs[start : index + 1]])).logits[0, -1]
        loss -= float(F.log_softmax(logits.double(), -1)[tokens[index]])
    return math.exp(loss / len(starts))


def test_a_window_whose_perplexity_is_infinite_is_refused(llama, measure, tmp_path):
    model = LlamaForCausalLM.from_pretrained(llama).requires_grad_(False)
    for name, weight in model.named_parameters():
        weight.fill_("embed" in name or "norm" in name)  # 1 or 0: so all last states are 1
    model.lm_head.weight[5] = -3400 / model.config.hidden_size
    text = torch.tensor([0] * 37 + [5] * 4)
    score = scoring.score_windows(model, text, cut_windows(40, 4, 4), 4, 4, 16, lambda _: None)
    assert score.windows[-1] == math.inf
    assert (score.loss, score.refusal[:36]) == (None, "the perplexity, or that of a window,")
    # Its other windows do not count, nor does the picture of an earlier call.
    model.save_pretrained(tmp_path / "odd")
    save_tokenizer(tmp_path / "odd", WORDS)
    for name, path in (("usual", llama), ("odd", tmp_path / "odd")):
        row = measure(f"{name}={path}", "--lengths=4", "--stride=1", "--windows=30")[name, 4]
        assert ("window_1" in row) == (tmp_path / "out/lm-length.png").exists() == (name != "odd")
    measure(f"usual={llama}", f"odd={tmp_path / 'odd'}", "--lengths=5", "--stride=5", "--windows=3")
    huge = r"(?s)odd: .* divided by .*: 0\.000 to \d\.\d+e\+304\n.*odd, .* \d\.\d+e\+\d+ \(\d+ s\)"
    assert re.search(huge, (tmp_path / "printed").read_text())


def test_perplexities_are_those_of_single_passes(llama, measure, tmp_path):
    """With the positions that the model has, and with others; also beyond its trained length.

    A stride longer than a window makes windows that do not overlap.
    """
    text = " ".join(WORDS * 2)
    (tmp_path / "text.txt").write_text(text)
    tokens = Fast.from_pretrained(llama)(text)["input_ids"]
    model = set_positions(LlamaForCausalLM.from_pretrained(llama), "alibi", 24)
    model.save_pretrained(tmp_path / "saved")
    save_tokenizer(tmp_path / "saved", WORDS)
    specs = {"plain": None, "yarn": "own(scaling=yarn:4)", "none": "none", "near": "alibi"}
    names = [f"{name}={llama}" + (f"@{spec}" if spec else "") for name, spec in specs.items()]
    names.append(f"saved={tmp_path / 'saved'}")
    rows = measure(*names, "--lengths", "4,8,24", "--stride", "6", "--max-tokens", "50")
    for length in (4, 8, 24):
        saved, near = rows.pop(("saved", length)), rows["near", length]
        assert saved["perplexity"] == near["perplexity"]
        assert saved["position_encoding"] == near["position_encoding"] == "alibi"
    for (name, length), row in rows.items():
        model = LlamaForCausalLM.from_pretrained(llama)
        if specs[name]:
            set_positions(model, specs[name], 24)
        stride = min(6, length)
        starts = {i: max(0, i // stride * stride - length + stride) for i in range(len(tokens))}
        assert row["perplexity"] == pytest.approx(by_hand(model, tokens, starts), rel=1e-4)
        assert (row["tokens"], row["stride"]) == (len(tokens), stride)
    assert len({x["perplexity"] for x in rows.values()}) == len(rows), "each spec changes them"


def test_a_table_ends_where_it_ends(measure, tmp_path):
    MODELS["gpt2"].build(max_position_embeddings=16).save_pretrained(tmp_path / "gpt2")
    save_tokenizer(tmp_path / "gpt2", WORDS)
    rows = measure(f"gpt2={tmp_path / 'gpt2'}", "--lengths", "16,20", "--stride", "8")
    assert rows["gpt2", 16]["perplexity"]
    assert rows["gpt2", 20]["perplexity"] is None
    assert "limit of 16" in rows["gpt2", 20]["refusal"]


def test_mistakes_are_one_line_and_no_model_is_scored_before(llama, measure, tmp_path, capsys):
    (tmp_path / "model.pt").touch()
    names = ("blanks", "other", "damaged")
    blanks, other, damaged = (shutil.copytree(llama, tmp_path / name) for name in names)
    (damaged / "model.safetensors").write_bytes(b"")
    save_tokenizer(other, WORDS[:5])
    path = blanks / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "decoder": {"type": "Fuse"}}))
    for models_, message in (
        ([f"a={blanks}"], "reads its tokenizer wrongly"),
        ([f"a={llama}", f"b={other}"], "tokenize the text differently"),
        ([f"a={tmp_path / 'model.pt'}"], "folder of transformers; export a fairseq checkpoint, or"),
        ([f"a={llama}", f"b={tmp_path}"], f"b: {tmp_path}: no config.json: give a model fo"),
        ([f"a={llama}", f"b={damaged}"], "damaged: its model cannot be read"),
        ([f"a={llama}", f"b={llama}@rotary"], "'rotary'"),
        ([f"a={llama}", f"b={llama}@own(bas=3)"], "no option 'bas'; did you mean base?"),
        ([f"a={llama}", f"b={llama}@"], "cannot read position encoding ''"),
        ([f"a={llama}", "--windows", "22"], "would predict the same tokens"),
        ([f"a={llama}", "--stride", "9", "--windows", "2"], "--stride 9: give at most 8, the"),
        ([f"a={llama}", f"a={llama}"], "'a': each value needs its own name"),
        ([f"lm-length.png={llama}"], "'lm-length.png': each value needs its own name, which no f"),
    ):
        assert message in measure(*SHORT, *models_, fails=True)
        assert not (tmp_path / "out").exists()
    assert "text.txt has only 80 tokens" in measure(f"a={llama}", "--lengths", 999, fails=True)
    assert "required: --text" in refused(capsys, "lm-length", f"a={llama}", *SHORT)


def test_only_one_model_at_a_time_is_in_memory(llama, measure, monkeypatch):
    models, before, load = weakref.WeakSet(), [], hf_model.load

    def count_and_load(*arguments):
        gc.collect()
        before.append(len(models))
        models.add(model := load(*arguments))
        return model

    monkeypatch.setattr(hf_model, "load", count_and_load)
    measure(f"own={llama}", f"none={llama}@none", *SHORT)
    assert before == [0] * 4


def test_spread_windows_predict_equal_tokens_at_every_length(llama, measure, tmp_path, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)  # progress bars are shown
    tokens = Fast.from_pretrained(llama)(TEXT)["input_ids"]
    names = [f"own={llama}", f"none={llama}@none"]
    rows = measure(*names, "--lengths", "8,24", "--stride", "4", "--windows", "5")
    model = LlamaForCausalLM.from_pretrained(llama)
    ends = [24 + (len(tokens) - 24) * number // 4 for number in range(5)]
    for length in (8, 24):
        windows = [{i: end - length for i in range(end - 4, end)} for end in ends]
        perplexities = [by_hand(model, tokens, starts) for starts in windows]
        row = rows["own", length]
        assert [row[f"window_{n}"] for n in range(1, 6)] == pytest.approx(perplexities, rel=1e-4)
        assert row["tokens"] == 20
        assert row["perplexity"] == pytest.approx(statistics.geometric_mean(perplexities), rel=1e-4)
    pattern = r"(?s)none: its perplexity divided by that of own .* 8: [\d.]+ to [\d.]+; 24:"
    pattern += r".*own, 24 tokens: 100%\|.* 20\.0/20\.0 "
    assert re.search(pattern, (tmp_path / "printed").read_text())
    assert report.draw(read(tmp_path / "out/lm-length.json"), tmp_path / "drawn.svg")
    drawn = (tmp_path / "drawn.svg").read_text()
    assert all(f"<!-- {x} -->" in drawn for x in ("context length, tokens", "perplexity per token"))


def test_names_may_be_specs_and_paths_may_have_an_at(llama, tmp_path):
    odd = shutil.copytree(llama, tmp_path / "a@b")
    models_ = [f"rope(base=100)={odd}", f"near={odd}@alibi"]
    assert parse_models(models_) == [("rope(base=100)", odd, None), ("near", odd, "alibi")]


def test_a_finished_score_is_not_computed_again_and_another_request_is_refused(llama, measure):
    first = measure(f"a={llama}", *SHORT)
    assert measure(f"a={llama}", *SHORT) == first
    assert "other positions: None, not none" in measure(f"a={llama}@none", *SHORT, fails=True)
    more = measure(f"a={llama}", f"b={llama}@none", *SHORT)
    assert more["a", 8]["seconds"] == first["a", 8]["seconds"]


@pytest.mark.slow
def test_a_killed_measurement_continues_with_the_score_that_it_was_at(llama, tmp_path, capsys):
    (tmp_path / "text.txt").write_text(" ".join([TEXT] * 8))
    out = tmp_path / "out"
    words = ["lm-length", f"a={llama}", "--text", tmp_path / "text.txt", "--out", out]
    words += ["--lengths", "8,16,24", "--stride", "1", "--max-tokens", "48"]
    kill_command(words, lambda: any(out.glob("a/*.json")), out)
    finished = {path: path.read_bytes() for path in out.glob("a/*.json")}
    assert len(finished) < 3
    assert call(capsys, *words)[1].count("perplexity") == 3 - len(finished)
    assert all(path.read_bytes() == content for path, content in finished.items())
    assert len(json.loads((out / "lm-length.json").read_text())["figures"]["perplexity"]) == 3
