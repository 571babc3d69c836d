"""What is loaded, what is adapted, and what is refused."""

from __future__ import annotations

import argparse
import logging
import os
from argparse import Namespace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.multiprocessing.spawn import ProcessRaisedException

from conftest import STOCK, make_model, make_tokens
from fairseq_posenc.errors import UserError, one_line
from fairseq_posenc.transformer.commands import install_excepthook


def test_fairseqs_namespace_is_loaded_without_running_code(tmp_path):
    path = tmp_path / "checkpoint.pt"
    torch.save({"args": argparse.Namespace(arch="x"), "w": torch.ones(2)}, path)
    assert torch.load(path, weights_only=True)["args"].arch == "x"


class _RunsCode:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_pickle_that_would_run_code_is_refused_in_a_line(tmp_path):
    path, trace = tmp_path / "checkpoint.pt", tmp_path / "it_ran"
    torch.save({"model": _RunsCode(trace)}, path)
    with pytest.raises(Exception, match="Weights only load failed") as caught:
        torch.load(path)
    assert not trace.exists()
    message = one_line(caught.value)
    assert "checkpoint refused, because loading it could run code" in message
    assert "mkdir" in message
    assert "\n" not in message


OTHER_POSITIONS = [
    ("learned", "m4m", "m4m.table.weight .* is not in the checkpoint.*is not in the model"),
    ("m4m", "none", "layers.0.self_attn.encodings.m4m.table.weight .* is not in the model"),
    ("m4m", "m4m(max_distance=5)", r"is \(1, 47, 8\) in the checkpoint, \(1, 11, 8\) in the model"),
]


@pytest.mark.parametrize(("old", "new", "message"), OTHER_POSITIONS)
def test_other_position_parameters_are_an_error_that_names_them(old, new, message):
    state = make_model("masked_lm", position_encoding=old).state_dict()
    model = make_model("masked_lm", position_encoding=new)
    with pytest.raises(UserError, match=message) as caught:
        model.load_state_dict(state)
    assert "--init-positions" in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "where"), [("m4", "m4+reset", "checkpoint"), ("m4+reset", "m4", "model")]
)
def test_a_table_without_the_rows_of_the_reset_is_no_shorter_one(old, new, where):
    state = make_model("masked_lm", position_encoding=old).state_dict()
    model = make_model("masked_lm", position_encoding=new)
    with pytest.raises(UserError, match=rf"m4.table.reset \(1, 2, 8\) is not in the {where}"):
        model.load_state_dict(state)


@pytest.mark.parametrize(("old", "new", "message"), OTHER_POSITIONS)
def test_init_positions_accepts_them_and_names_each_in_the_log(old, new, message, caplog):
    source = make_model("masked_lm", position_encoding=old)
    model = make_model("masked_lm", position_encoding=new, init_positions=True)
    fresh = {k: v.clone() for k, v in model.state_dict().items() if ".encodings." in k}
    with caplog.at_level(logging.WARNING):
        model.load_state_dict(source.state_dict())
    for name, value in model.state_dict().items():
        expected = fresh[name] if ".encodings." in name else source.state_dict()[name]
        torch.testing.assert_close(value, expected, rtol=0, atol=0)
    for name in fresh:
        assert name in caplog.text


def test_a_longer_stock_table_is_an_error_that_gives_both_sizes():
    state = make_model("masked_lm", STOCK["masked_lm"], max_positions=40).state_dict()
    model = make_model("masked_lm", position_encoding="learned")
    with pytest.raises(UserError, match=r"is \(40, 32\) in the checkpoint, \(24, 32\) in the mod"):
        model.load_state_dict(state)


def test_numbers_of_scikit_learns_metrics_are_loaded(tmp_path):
    torch.save({"best": np.float64(0.5)}, tmp_path / "checkpoint.pt")
    assert torch.load(tmp_path / "checkpoint.pt")["best"] == 0.5


@pytest.mark.parametrize("spec", ["m4m", "m4(reset=true)", "raffel", "deberta"])
def test_a_table_by_distance_grows_with_the_positions_by_clipping(spec):
    short = make_model("masked_lm", position_encoding=spec)
    for name, parameter in short.named_parameters():
        if ".encodings." in name:
            torch.nn.init.normal_(parameter)
    tokens = make_tokens(2, 60)  # longer than its 24 positions: it clips
    long = make_model("masked_lm", position_encoding=spec, max_positions=64)
    long.load_state_dict(short.state_dict())
    torch.testing.assert_close(long(tokens)[0], short(tokens)[0])


@pytest.mark.parametrize("spec", ["learned", "m4m", "learned+raffel"])
def test_layerdrop_pruning_keeps_each_layers_own_table(spec):
    whole = make_model("masked_lm", position_encoding=spec)
    options = {"arch": "roberta_none_tiny", "encoder_layers_to_keep": "0,2"}
    pruned = make_model("masked_lm", position_encoding=spec, encoder_layers_to_keep="0,2")
    pruned.load_state_dict(whole.state_dict(), model_cfg=Namespace(**options))
    for new, old in ((0, 0), (1, 2)):
        ours = pruned.encoder.sentence_encoder.layers[new].state_dict()
        torch.testing.assert_close(ours, whole.encoder.sentence_encoder.layers[old].state_dict())


def test_layerdrop_pruning_keeps_each_layers_direction():
    model = make_model("masked_lm", "decbert_diff", encoder_layers=3, encoder_layers_to_keep="1,2")
    assert model.encoder.sentence_encoder.directions == ("rl", "both")


@pytest.mark.parametrize("spec", ["sinusoidal", "rope", "none"])
def test_fairseqs_sinusoids_are_not_taken_for_others(spec):
    """Older checkpoints of fairseq carry a mark of their sinusoids."""
    state = make_model("translation", position_encoding="none").state_dict()
    state["encoder.embed_positions._float_tensor"] = torch.zeros(1)
    model = make_model("translation", position_encoding=spec)
    with pytest.raises(UserError, match=r"sinusoidal\(layout=fairseq\) here, not " + spec):
        model.load_state_dict(dict(state))
    make_model("translation", position_encoding="sinusoidal(layout=fairseq)").load_state_dict(state)


def test_a_missing_restore_file_stops_fairseq(tmp_path, monkeypatch):
    trainer = logging.getLogger("fairseq.trainer")
    with pytest.raises(UserError, match="does not exist"):
        trainer.info("No existing checkpoint found /no/such/folder/checkpoint_last.pt")
    last = tmp_path / "checkpoint_last.pt"
    trainer.info(f"No existing checkpoint found {last}")  # a first start
    monkeypatch.setattr("sys.argv", ["fairseq-train", "--restore-file", str(last)])
    with pytest.raises(UserError, match="does not exist"):
        trainer.info(f"No existing checkpoint found {last}")


def test_the_guard_hears_what_the_user_does_not(caplog):
    """With LOGLEVEL=WARNING fairseq would not even ask the filter."""
    trainer, fairseq = logging.getLogger("fairseq.trainer"), logging.getLogger("fairseq")
    fairseq.setLevel(logging.WARNING)
    try:
        with pytest.raises(UserError, match="does not exist"):
            trainer.info("No existing checkpoint found /no/such.pt")
        trainer.info("begin training epoch 1")
    finally:
        fairseq.setLevel(logging.NOTSET)
    assert "begin training" not in caplog.text


def test_a_missing_restore_file_of_another_name_stops_fairseq():
    trainer = logging.getLogger("fairseq.trainer")
    with pytest.raises(UserError, match=r"--restore-file /no/such\.pt does not exist"):
        trainer.info("No existing checkpoint found /no/such.pt")


def test_a_full_disk_stops_fairseq_before_it_touches_a_checkpoint(tmp_path, monkeypatch):
    trainer = logging.getLogger("fairseq.trainer")
    (tmp_path / "checkpoint_last.pt").write_bytes(bytes(1000))
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1099))
    with pytest.raises(UserError, match=r"no room for a checkpoint in .* are whole"):
        trainer.info(f"Saving checkpoint to {tmp_path}/checkpoint1.pt")
    trainer.info(f"Finished saving checkpoint to {tmp_path}/checkpoint1.pt")
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1100))
    trainer.info(f"Saving checkpoint to {tmp_path}/checkpoint1.pt")


def test_users_see_one_line_whatever_fairseq_wraps_around_it(capsys, monkeypatch):
    monkeypatch.setattr("sys.excepthook", lambda *_: pytest.fail("a stack trace"))
    install_excepthook()
    install_excepthook()  # twice is once
    try:
        try:
            raise UserError("the mistake")
        except UserError:
            raise Exception("Cannot load model parameters from checkpoint") from None
    except Exception as error:
        import sys

        sys.excepthook(type(error), error, error.__traceback__)
    assert capsys.readouterr().err == "fairseq-posenc: error: the mistake\n"


def test_a_mistake_told_by_another_rank_is_one_line():
    text = "\n\n-- Process 1 terminated with the following error:\nTraceback ...\n"
    error = ProcessRaisedException(f"{text}fairseq_posenc.errors.UserError: the mistake\n", 1, 2)
    assert one_line(error) == "the mistake"


def test_other_errors_keep_their_stack_trace():
    assert one_line(KeyError("x")) is None
