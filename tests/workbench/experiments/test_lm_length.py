"""Perplexity of causal language models against context length."""

from __future__ import annotations

import math
import re
import shutil
import signal
import subprocess
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from fairseq.data import Dictionary
from torch.nn import functional as F

from fairseq_posenc import registry
from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench import cli
from fairseq_posenc.workbench.experiments.length.fairseq_model import load, predict, read_stream
from fairseq_posenc.workbench.experiments.length.model import (
    LoadedModel,
    parse_models,
)
from fairseq_posenc.workbench.experiments.length.scoring import score_windows
from fairseq_posenc.workbench.experiments.length.stream import (
    Stream,
    Window,
    batch_windows,
    cut_windows,
)
from fairseq_posenc.workbench.results.record import read
from fairseq_posenc.workbench.running.devices import CPU
from tests.helpers.commands import USER_DIR, new_directory, run, script, sentences, train, trained
from tests.helpers.products import product_of
from tests.helpers.programs import true_start
from tests.helpers.tiny_models import make_model, make_tokens

slow = pytest.mark.slow
EOS = 2
TRAINED = 16  # tokens of a sample
SIZES = [
    (10, 4, 4),
    (10, 4, 1),
    (10, 4, 3),
    (12, 4, 2),
    (97, 16, 5),
    (5, 8, 8),
    (5, 8, 2),
    (1, 1, 1),
]
each_size = pytest.mark.parametrize(("total", "length", "stride"), SIZES)


# ------------------------------------------------------------------------------------- windows


@each_size
def test_every_token_is_scored_once_and_none_reads_too_much(total, length, stride):
    found = list(cut_windows(total, length, stride))
    assert [token for w in found for token in range(w.scored, w.end)] == list(range(total))
    assert all(0 < w.end - w.start <= length for w in found)
    for window in found:
        assert window.scored - window.start >= min(window.scored, length - stride)


def test_blocks_do_not_overlap():
    assert list(cut_windows(10, 4, 4)) == [Window(0, 0, 4), Window(4, 4, 8), Window(8, 8, 10)]


def test_the_window_slides():
    assert list(cut_windows(7, 4, 2)) == [
        Window(0, 0, 2),
        Window(0, 2, 4),
        Window(2, 4, 6),
        Window(4, 6, 7),
    ]


@each_size
def test_batches_hold_equal_shapes_in_order_and_few_tokens(total, length, stride):
    pieces = list(cut_windows(total, length, stride))
    found = list(batch_windows(iter(pieces), 20))
    assert [window for batch in found for window in batch] == pieces
    assert all(len({window.shape for window in batch}) == 1 for batch in found)
    assert all(len(batch) == 1 or len(batch) * batch[0].shape[0] <= 20 for batch in found)


def test_a_window_longer_than_the_limit_of_tokens_is_a_batch_of_its_own():
    assert [len(batch) for batch in batch_windows(cut_windows(64, 32, 32), 8)] == [1, 1]


# ------------------------------------------------------------------------------------- figures


def stream_of(count: int) -> Stream:
    return Stream.from_tokens(make_tokens(batch=1, length=count)[0][1:], EOS)


def score_stream(loaded: LoadedModel, stream: Stream, length: int, stride: int, max_tokens: int):
    windows = cut_windows(stream.size, length, stride)
    return score_windows(loaded, stream, windows, length, stride, max_tokens)


def loaded(encoding: str) -> LoadedModel:
    model = make_model("causal_lm", position_encoding=encoding).double()
    return LoadedModel(model, partial(predict, model), encoding, 24, None, None)


@torch.no_grad()
def by_hand(model, stream: Stream, length: int, stride: int) -> float:
    """Return bits per token, each token from a forward pass of its own, up to it."""
    bits = 0.0
    for token in range(stream.size):
        start = max(0, token // stride * stride - (length - stride))
        logits = model(stream.inputs[None, start : token + 1])[0][0, -1]
        bits -= float(F.log_softmax(logits, -1)[stream.targets[token]]) / math.log(2)
    return bits / stream.size


def test_the_first_token_is_predicted_from_the_end_of_a_sentence():
    stream = Stream.from_tokens(torch.tensor([7, 5, 2, 9]), EOS)
    assert stream.inputs.tolist() == [2, 7, 5, 2]
    assert stream.targets.tolist() == [7, 5, 2, 9]


@pytest.mark.parametrize(("encoding", "stride"), product_of(registry.names(), [4, 3, 1]))
def test_the_loss_of_ten_tokens_is_that_of_predicting_them_one_by_one(encoding, stride):
    stream = Stream.from_tokens(torch.tensor([7, 5, 12, 2, 9, 9, 4, 22, 2, 8]), EOS)
    ours = loaded(encoding)
    found = score_stream(ours, stream, 4, stride, 8)
    assert found.tokens == 10
    assert found.loss == pytest.approx(by_hand(ours.model, stream, 4, stride), abs=1e-6)
    assert found.perplexity == pytest.approx(2**found.loss)


def test_beyond_the_trained_length_only_tables_of_positions_refuse():
    stream = Stream.from_tokens(torch.arange(4, 24).repeat(3), EOS)  # a sentence of 60 tokens
    refused = {}
    for name in registry.names():
        found = score_stream(loaded(name), stream, 40, 40, 4096)
        assert (found.loss is None) == bool(found.refusal)
        if found.refusal:
            refused[name] = found.refusal
    assert set(refused) == {"learned", "sentence_learned", "tupe", "tupe_shared"}
    assert all("a sequence of 40 tokens is longer than the 24" in text for text in refused.values())


def test_probabilities_too_small_for_a_number_are_no_figure():
    ours = loaded("none")
    ours.model.decoder.output_projection.weight.data.fill_(math.nan)
    found = score_stream(ours, stream_of(9), 4, 4, 8)
    assert found.perplexity is None
    assert "too small for a number" in found.refusal


# --------------------------------------------------------------------------------- what to read


def test_names_may_be_specs_and_paths_may_have_an_at(tmp_path):
    for name in ("a.pt", "b@home.pt"):
        (tmp_path / name).touch()
    found = parse_models(
        [
            f"plain={tmp_path}/a.pt",
            f"m4(max_distance=8)={tmp_path}/a.pt@m4(max_distance=8)",
            f"home={tmp_path}/b@home.pt",
            f"both={tmp_path}/b@home.pt@rope(scaling=ntk:4)",
        ]
    )
    assert [each.name for each in found] == ["plain", "m4(max_distance=8)", "home", "both"]
    assert [each.path.name for each in found] == ["a.pt", "a.pt", "b@home.pt", "b@home.pt"]
    overrides = [each.spec_override and str(each.spec_override) for each in found]
    assert overrides == [None, "m4(max_distance=8)", None, "rope(scaling=ntk:4)"]


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["model.pt"], "cannot read 'model.pt': write NAME=MODEL or NAME=MODEL@SPEC"),
        (["=model.pt"], "cannot read"),
        (["rope="], "cannot read"),
        (["a/b={0}"], "the name must be a valid folder name"),
        (["rope=no.pt"], "rope: the checkpoint no.pt does not exist"),
        (["rope={0}@rotary"], "unknown position encoding 'rotary'"),
        (["rope={0}", "rope={0}"], "two models are called 'rope'"),
    ],
)
def test_candidates_that_cannot_be(texts, message, tmp_path):
    path = tmp_path / "model.pt"
    path.touch()
    with pytest.raises(UserError, match=re.escape(message)):
        parse_models([text.format(path) for text in texts])


# ------------------------------------------------------------------------------ trained models


@cache
def checkpoint(encoding: str | None) -> Path:
    """Return a model with an encoding, trained on blocks of 16; None for fairseq's own."""
    model = ["--position-encoding", encoding] if encoding else ["--arch", "transformer_lm"]
    tiny = [] if encoding else ["--decoder-layers", 1, "--decoder-embed-dim", 32]
    blocks = ["--sample-break-mode", "none", "--max-epoch", 2, "--no-epoch-checkpoints"]
    user_dir = USER_DIR if encoding else None
    return train("causal_lm", *model, *tiny, *blocks, user_dir=user_dir).save_dir / (
        "checkpoint_last.pt"
    )


@pytest.fixture
def measure(tmp_path, capsys):
    """Return a function that runs the command and returns its JSON; ``fails`` for its error."""

    def call(*arguments, fails=False):
        done = cli.main(
            ["lm-length", "--data", str(sentences()), "--out", str(tmp_path / "out")]
            + [str(each) for each in arguments]
        )
        said = capsys.readouterr()
        if fails:
            assert done == 2
            (line,) = [line for line in said.err.splitlines() if "error: " in line]
            return line.removeprefix("fairseq-posenc: error: ")
        assert done == 0
        record = read(tmp_path / "out" / "lm-length.json")
        return {"printed": said.out, "said": said.err, "rows": record.rows, **record.data}

    return call


def count_tokens(split: str) -> int:
    text = (sentences().parent / split).read_text()
    return len(text.split()) + len(text.splitlines())  # an end of sentence each


def figures(results, mode):
    return [row for row in results["rows"] if row["evaluation"] == mode]


@slow
@pytest.mark.parametrize(
    ("mode", "stride", "length"), [("non-overlapping", 16, 16), ("sliding", 5, 12)]
)
def test_perplexity_is_that_of_fairseq_eval_lm(measure, mode, stride, length):
    path = checkpoint("rope")
    done = run(
        "fairseq-eval-lm",
        sentences(),
        *("--user-dir", USER_DIR, "--path", path, "--gen-subset", "valid", "--cpu"),
        *("--tokens-per-sample", length, "--context-window", length - stride),
        *("--sample-break-mode", "none", "--num-workers", 0),
    )
    loss, perplexity = re.search(r"Loss \(base 2\): (\S+), Perplexity: (\S+)", done.log).groups()
    options = ["--lengths", length, "--mode", mode, "--stride", stride]
    (found,) = figures(measure(f"rope={path}", *options), mode)
    assert f"{found['loss']:.4f}" == loss
    assert f"{found['perplexity']:.2f}" == perplexity
    assert found["tokens"] == count_tokens("valid")


@slow
def test_table_figures_and_picture_of_several_models(measure, tmp_path):
    models = [
        f"rope={checkpoint('rope')}",
        f"learned={checkpoint('learned+m4')}",
        f"rope ntk:4={checkpoint('rope')}@rope(scaling=ntk:4)",
    ]
    results = measure(*models, "--lengths", "32,8,16", "--stride", "8")
    tokens = count_tokens("valid")
    assert results["tokens"] == tokens
    assert f"{tokens} tokens of " in results["said"]
    assert [row["length"] for row in results["rows"]] == [8, 16, 32] * 2 * 3
    for row in results["rows"]:
        assert (row["trained_length"], row["updates"]) == (TRAINED, 2)
        refused = row["model"] == "learned" and row["length"] == 32
        assert (row["loss"] is None) == bool(row["refusal"]) == refused
        assert refused or row["tokens"] == tokens
    assert results["rows"][-1]["override"] == "rope(scaling=ntk:4)"
    assert results["printed"].startswith("| model | evaluation | trained at | 8 | 16 | 32 |\n")
    rows = re.findall(r"\| learned \| (\S+) \| 16 \| \S+ \| \S+ \| - \|", results["printed"])
    assert rows == ["non-overlapping", "sliding"]
    note = "- learned: no figure, because a sequence of 32 tokens is longer than the 16 positions"
    assert note in results["printed"]
    report = (tmp_path / "out" / "lm-length.md").read_text()
    assert results["printed"].strip() in report
    assert "(lm-length.png)" in report
    assert (tmp_path / "out" / "lm-length.png").read_bytes().startswith(b"\x89PNG")


@slow
def test_an_override_changes_the_rotation_and_nothing_else():
    stream = read_stream(sentences(), "valid")
    path = checkpoint("rope")
    texts = ["plain", "one@rope(scaling=linear:1)", "four@rope(scaling=linear:4)"]
    variants = [f"{text.replace('@', f'={path}@')}" for text in texts[1:]]
    plain, one, four = (
        load(variant, sentences(), CPU) for variant in parse_models([f"plain={path}", *variants])
    )
    assert [str(each.encoding) for each in (plain, one, four)] == [
        "rope",
        "rope",  # a factor of 1 stretches nothing
        "rope(scaling=linear:4)",
    ]
    for name, parameter in four.model.named_parameters():
        assert torch.equal(parameter, plain.model.get_parameter(name))
    dictionary = Dictionary.load(str(sentences() / "dict.txt"))
    tokens = make_tokens(symbols=len(dictionary) - 4)
    ours, same, slowed = (each.model(tokens)[0] for each in (plain, one, four))
    torch.testing.assert_close(same, ours)
    torch.testing.assert_close(slowed[:, :1], ours[:, :1])  # nothing to turn against
    assert (slowed[:, 1:] - ours[:, 1:]).abs().max() > 1e-4
    losses = [score_stream(each, stream, 32, 8, 4096).loss for each in (plain, one, four)]
    assert losses[0] == pytest.approx(losses[1])
    assert losses[0] != pytest.approx(losses[2], rel=1e-6)


@slow
def test_an_override_that_the_trained_parameters_do_not_fit(measure):
    path, spec = checkpoint("learned+m4"), "learned+m4(max_distance=3)"
    told = measure(f"m4={path}@{spec}", "--lengths", "64", fails=True)
    assert told.startswith(f"m4: {path} cannot be read with {spec}: the checkpoint's positions")
    assert (
        "self_attn.encodings.m4.table.weight is (1, 31, 16) in the checkpoint, (1, 7, 16)" in told
    )


@slow
def test_a_model_of_fairseqs_own_is_measured_up_to_its_limit(measure):
    results = measure(f"stock={checkpoint(None)}", "--lengths", "16,32", "--stride", "8")
    short, long = figures(results, "non-overlapping")
    assert short["loss"] > 0
    assert long["loss"] is None
    assert long["refusal"] == "32 tokens are more than the model's limit of 16"
    assert short["position_encoding"] == "fairseq's TransformerLanguageModel"
    told = measure(f"stock={checkpoint(None)}@learned", "--lengths", "64", fails=True)
    assert "is fairseq's own model, which takes no @SPEC" in told


@slow
def test_a_killed_measurement_goes_on_with_the_figure_that_it_was_at(measure, tmp_path):
    options = [f"rope={checkpoint('rope')}", "--lengths", "8,12,24,48", "--stride", "2"]
    command = ["lm-length", "--data", sentences(), "--out", tmp_path / "out", *options]
    with subprocess.Popen(
        [script("fairseq-posenc"), *map(str, command)],
        env={**true_start(), "CUDA_VISIBLE_DEVICES": ""},
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    ) as process:
        told = next(line for line in process.stderr if "non-overlapping, 8: " in line)
        next(line for line in process.stderr if "non-overlapping, 12: " in line)  # then 8 is kept
        process.kill()
    assert process.returncode == -signal.SIGKILL, "it ended before it could be killed"
    resumed = measure(*options)
    assert told.partition(" (")[0] not in resumed["said"]
    assert "rope, sliding, 48: perplexity" in resumed["said"]
    shutil.rmtree(tmp_path / "out")
    whole = measure(*options)
    seconds = {"seconds": 0}
    assert [{**row, **seconds} for row in resumed["rows"]] == [
        {**row, **seconds} for row in whole["rows"]
    ]
    assert "perplexity" not in measure(*options)["said"]  # all is there
    assert "perplexity" in measure(*options, "--max-tokens", 64)["said"]


@slow
def test_precision_is_a_choice(measure):
    options = [f"rope={checkpoint('rope')}", "--lengths", 16, "--mode", "non-overlapping"]
    (single,) = measure(*options, "--device", "cpu")["rows"]
    (half,) = measure(*options, "--bf16")["rows"]
    assert half["loss"] == pytest.approx(single["loss"], rel=1e-2)
    assert half["loss"] != single["loss"]
    told = measure(*options, "--device", "cpu", "--fp16", fails=True)
    assert told == "--fp16 is for GPUs; leave it out, or use --device cuda"


# ------------------------------------------------------------------------------------ bad input


@slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--stride", 9, "--lengths", "8,16"], "--stride 9 is more than the context length 8"),
        (["--stride", 0], "--stride: must be a whole number of at least 1, not '0'"),
        (["--lengths", "0,8"], "--lengths: must be a whole number of at least 1, not '0'"),
        (["--lengths", "8,x"], "--lengths: must be a whole number of at least 1, not 'x'"),
        (["--lengths", "64,4096"], "--lengths 4096: the split valid of .* has only"),
        (["--split", "dev"], "--split dev: .* it has the splits test, train, valid"),
        (["--data", "nowhere"], "--data nowhere: nowhere/dict.txt does not exist"),
        (
            ["alibi={0}@alibi", "--lengths", "64"],
            "was trained with rope; alibi is another encoding",
        ),
        (
            ["odd={0}@rope(fraction=0.2)", "--lengths", "64"],
            r"odd: .* cannot be read with rope\(fraction=0.2\): rope rotates pairs",
        ),
        (["--lengths", "64", "--out", "{0}"], "--out .*: File exists; name another folder"),
    ],
)
def test_a_wrong_setting_is_told_in_one_line(measure, arguments, message):
    path = checkpoint("rope")
    arguments = [str(each).format(path) for each in arguments]
    assert re.search(message, measure(f"rope={path}", *arguments, fails=True))


@slow
def test_a_model_that_is_no_causal_language_model(measure):
    path = trained("masked_lm").save_dir / "checkpoint_last.pt"
    told = measure(f"bert={path}", "--lengths", "64", fails=True)
    assert "was trained for the task masked_lm; give a causal language model" in told


def test_a_file_that_is_no_checkpoint(measure, tmp_path):
    for name, write in (
        ("text.pt", lambda path: path.write_text("hello")),
        ("tensor.pt", lambda path: torch.save({"model": torch.zeros(1)}, path)),
    ):
        write(tmp_path / name)
        told = measure(f"x={tmp_path / name}", "--lengths", "64", fails=True)
        assert told.startswith(f"x: {tmp_path / name}: ")


@slow
def test_a_model_with_another_target(measure, tmp_path):
    state = torch.load(checkpoint("rope"))
    state["cfg"]["task"]["add_bos_token"] = True
    torch.save(state, tmp_path / "bos.pt")
    told = measure(f"bos={tmp_path / 'bos.pt'}", "--lengths", "64", fails=True)
    assert "was trained with --add-bos-token: only models" in told


@slow
@pytest.mark.parametrize("size", ["other", "same"])
def test_a_dictionary_that_is_not_the_models(measure, size):
    data = new_directory() / "bin"
    shutil.copytree(sentences(), data)
    lines = (data / "dict.txt").read_text().splitlines()
    lines = [*lines, "new 1"] if size == "other" else lines[::-1]
    (data / "dict.txt").write_text("\n".join(lines) + "\n")
    told = measure(f"rope={checkpoint('rope')}", "--data", data, "--lengths", "64", fails=True)
    if size == "other":
        symbols = len(Dictionary.load(str(data / "dict.txt")))
        assert f"dict.txt has {symbols} symbols, but" in told
    else:
        assert "dict.txt has other symbols, or in another order, than the dictionary" in told
    assert "--data must have the dictionary that the model was trained with" in told
