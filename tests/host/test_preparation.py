"""How a training begins: its checkpoint, its folder, its room, and a line for what goes wrong."""

from __future__ import annotations

import copy
import gc
import logging
import os
import pickle
import re
import shutil
import subprocess
import sys
from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.dataclass.configs import FairseqConfig
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.tasks import FairseqTask
from hydra.errors import MissingConfigException
from omegaconf import OmegaConf
from torch.multiprocessing.spawn import ProcessRaisedException

from fairseq_posenc import locks
from fairseq_posenc.checkpoints.faults import find_message
from fairseq_posenc.checkpoints.recovery import find_start, restore_if_torn
from fairseq_posenc.error_messages import choose_exit_code
from fairseq_posenc.errors import UserError
from fairseq_posenc.host import preparation, startup
from fairseq_posenc.host.preparation import lock_save_dir, refuse_full_disk
from fairseq_posenc.models.causal_lm import PositionalLM
from tests.helpers.commands import EPOCHS, sentences, train, trained, validate
from tests.helpers.programs import true_start

# A command that ends while a thread of fairseq's computes a batch.
LOADING = """
import sys, torch, fairseq_cli
sys.excepthook = print  # as a program may do before it loads the plugin
import fairseq_posenc.models
assert sys.excepthook.args == (print,)  # which errors that are unknown are left to
from fairseq.data.iterators import BufferedIterator
def compute(_): return torch.rand(500, 500) @ torch.rand(500, 500)
next(BufferedIterator(999, torch.utils.data.DataLoader(range(999), collate_fn=compute)))
"""
# What a program of a user's does, with a package of encodings of the user's.
USERS = """
import os, sys, fairseq_posenc.user_dir
fairseq_posenc.user_dir.register()
print(sys.excepthook is sys.__excepthook__, os.environ.get("HYDRA_FULL_ERROR"))
open("absent")
"""


def configured(**checkpoint):
    """Return fairseq's configuration with settings of its section ``checkpoint``."""
    config = OmegaConf.structured(FairseqConfig)
    config.checkpoint.update(checkpoint)
    return config


def test_a_training_starts_from_its_own_last_checkpoint_or_from_what_is_named(tmp_path):
    folder, other = {"save_dir": str(tmp_path)}, tmp_path / "other.pt"
    last = tmp_path / "checkpoint_last.pt"
    other.write_bytes(b"")
    assert find_start(configured(**folder).checkpoint) is None
    tuned = configured(finetune_from_model=str(other), **folder).checkpoint
    assert find_start(tuned) == other
    assert find_start(configured(continue_once=str(other), **folder).checkpoint) == other
    last.write_bytes(b"")
    assert find_start(tuned) == find_start(configured(**folder).checkpoint) == last
    assert find_start(configured(restore_file=str(other), **folder).checkpoint) == other


@pytest.mark.parametrize("option", ["restore_file", "finetune_from_model", "continue_once"])
def test_a_missing_start_stops_fairseq(tmp_path, option):
    for path in (tmp_path / "absent" / "checkpoint_last.pt", tmp_path):
        message = f"--{option.replace('_', '-')} {path} is not a file; training would start"
        with pytest.raises(UserError, match=message):
            find_start(configured(save_dir=str(tmp_path), **{option: str(path)}).checkpoint)


def checkpoint_of(updates, path):
    torch.save({"optimizer_history": [{"num_updates": updates}], "w": torch.ones(999)}, path)


@pytest.mark.parametrize("left", [0, 1, 1000], ids=["nothing", "a byte", "a half"])
def test_a_last_checkpoint_that_was_not_written_to_its_end_is_passed_over(tmp_path, caplog, left):
    names = {"checkpoint_best.pt": 7, "checkpoint_1_12.pt": 12, "checkpoint1.pt": 9}
    for name, updates in names.items():
        checkpoint_of(updates, tmp_path / name)
    checkpoint_of(99, tmp_path / "checkpoint_of_mine.pt")
    (tmp_path / "checkpoint2.pt").write_bytes(b"PK\3\4")
    whole, last = (tmp_path / "checkpoint_1_12.pt").read_bytes(), tmp_path / "checkpoint_last.pt"
    last.write_bytes(whole[:left])
    before = {path.name for path in tmp_path.iterdir()}
    restore_if_torn(last, configured(save_dir=str(tmp_path)).checkpoint)
    assert last.read_bytes() == whole
    assert {path.name for path in tmp_path.iterdir()} == before
    assert [x.getMessage() for x in caplog.records if x.levelno == logging.WARNING] == [
        f"{last} was not written to its end; training resumes from checkpoint_1_12.pt, the "
        "newest complete checkpoint (update 12)"
    ]


def test_a_torn_checkpoint_that_was_asked_for_or_has_no_twin_is_refused(tmp_path):
    last = tmp_path / "checkpoint_last.pt"
    last.write_bytes(b"PK\3\4")
    message = f"{last} was not written to its end, and no complete checkpoint can replace it"
    with pytest.raises(UserError, match=message):
        restore_if_torn(last, configured(save_dir=str(tmp_path)).checkpoint)
    checkpoint_of(3, tmp_path / "checkpoint1.pt")
    named = configured(restore_file=str(last), save_dir=str(tmp_path)).checkpoint
    with pytest.raises(UserError, match=message):
        restore_if_torn(last, named)
    assert last.read_bytes() == b"PK\3\4"


OLD_STYLE = """
from fairseq import criterions, tasks
from fairseq.criterions.cross_entropy import CrossEntropyCriterion as Loss
from fairseq.tasks.language_modeling import LanguageModelingTask as Task
from fairseq_posenc.user_dir import register
register()
tasks.register_task("old")(type("OldTask", (Task,), {"add_args": Task.add_args}))
criterions.register_criterion("old")(type("OldLoss", (Loss,), {"add_args": Loss.add_args}))
"""  # without dataclasses


@pytest.mark.slow
def test_a_finished_training_changes_nothing(tmp_path):
    save_dir = shutil.copytree(trained("causal_lm").save_dir, tmp_path / "checkpoints")
    before = {path.name: path.read_bytes() for path in save_dir.glob("*.pt")}
    done = train("causal_lm", "--max-update", EPOCHS, save_dir=save_dir).run
    message = f"checkpoint_last.pt has made {EPOCHS} updates; --max-update is {EPOCHS}"
    assert f"{message}: the training is finished, and nothing was changed" in done.log
    assert "done training in" in done.log  # fairseq ended it, so that hydra's sweep goes on
    (tmp_path / "__init__.py").write_text(OLD_STYLE)
    old = ["--max-update", EPOCHS, "--task", "old", "--criterion", "old"]
    assert message in train("causal_lm", *old, save_dir=save_dir, user_dir=tmp_path).run.log
    assert {path.name: path.read_bytes() for path in save_dir.glob("*.pt")} == before
    other = ["--restore-file", save_dir / "checkpoint_last.pt", "--max-update", EPOCHS - 1]
    assert "nothing is left to train" in train("causal_lm", *other, fails=True).run.error()
    again = ["--restore-file", trained("causal_lm").save_dir / "checkpoint1.pt"]
    again = train("causal_lm", *again, save_dir=save_dir, fails=True).run.error()
    last = save_dir / "checkpoint_last.pt"
    assert f"would start again, and replace {last}: leave it out, and --reset" in again


@pytest.mark.slow
def test_a_second_training_in_a_save_dir_is_refused(tmp_path):
    settings = configured(save_dir=str(tmp_path))
    lock_save_dir(settings)
    second = train("masked_lm", "--max-update", 1, save_dir=tmp_path, fails=True)
    line = rf"--save-dir {tmp_path}: process {os.getpid()} on .*, since 20.* is running there; wait"
    assert re.match(line, second.run.error())
    assert not list(tmp_path.glob("*.pt"))
    lock_save_dir(settings)  # the process that holds it may
    locks.release(preparation._held.pop(tmp_path))
    train("masked_lm", "--max-update", 1, save_dir=tmp_path)
    last = str(tmp_path / "checkpoint_last.pt")
    lock_save_dir(settings)
    validate("masked_lm", last)  # while it is trained
    locks.release(preparation._held.pop(tmp_path))
    _, cfg, task = checkpoint_utils.load_model_ensemble_and_task([last])
    task.build_criterion(cfg.criterion)
    assert tmp_path not in preparation._held  # what a loaded model needs is no training


def test_a_training_without_a_configuration_warns_unless_options_are_of_argparse(tmp_path, caplog):
    model, task = preparation.CheckedModel(), FairseqTask(None)
    preparation.prepare_model(model, task)
    model.load_state_dict({})  # a task may begin with weights, also in a new training
    assert task.build_criterion(Namespace(criterion="cross_entropy", sentence_avg=True))
    assert "no configuration of fairseq: options are unchecked, no folder locked" in caplog.text
    # Options of argparse, which fairseq gives to a user's task and criterion without dataclasses.
    options = Namespace(save_dir=str(tmp_path), patience=3, distributed_world_size=2)
    settings, is_copy = preparation._find_settings(None, options)
    assert (is_copy, settings.checkpoint.patience) == (True, 3)
    checkpoint_of(3, tmp_path / "checkpoint_last.pt")
    with pytest.raises(UserError, match=r"2 ranks read .*: add --load-checkpoint-on-all-dp-ranks"):
        preparation._prepare_resumption(model, settings, is_copy)


@pytest.mark.slow
def test_copies_of_a_task_prepare_for_themselves_and_a_task_does_not_keep_its_models():
    names = "checkpoint1.pt:checkpoint_last.pt"
    hub = PositionalLM.from_pretrained(str(trained("causal_lm").save_dir), names, str(sentences()))
    task = hub.task
    task.state = task.args = None  # which fairseq can neither copy nor pickle
    for each in (task, copy.deepcopy(hub).task, pickle.loads(pickle.dumps(task))):
        assert each.build_criterion.args == each.eval_lm_dataloader.args == (each,)
    del hub
    gc.collect()
    assert task not in [owner() for owner in preparation._built.values()]


def test_a_full_disk_stops_fairseq_before_it_touches_a_checkpoint(tmp_path, monkeypatch):
    (tmp_path / "checkpoint_last.pt").write_bytes(bytes(1000))
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1099))
    with pytest.raises(UserError, match=r"no room for a checkpoint in .* are complete"):
        refuse_full_disk(str(tmp_path))
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1100))
    refuse_full_disk(str(tmp_path))


def test_a_command_may_end_while_batches_are_loaded_ahead():
    subprocess.run([sys.executable, "-c", LOADING], env=true_start(), check=True)


def test_users_see_one_line_whatever_fairseq_wraps_around_it(capsys):
    error = Exception("Cannot load model parameters from checkpoint")
    error.__context__, error.__suppress_context__ = UserError("the mistake"), True  # `from None`
    stopped = "stopped; the command, without --restore-file, continues"
    for each, said in ((error, "the mistake\n"), (KeyboardInterrupt(), stopped)):
        with pytest.raises(type(each)) as caught:
            exec("raise each", {"each": each, "__package__": "fairseq_cli"})
        startup.report(None, type(each), each, caught.tb)
        assert capsys.readouterr().err.startswith(f"fairseq-posenc: error: {said}")


@pytest.mark.parametrize("module", ["sys", "fairseq_cli.train"])
def test_a_program_of_the_users_keeps_its_errors_whole(module, tmp_path):
    """Also one that imports a command, as that of fairseq's to generate is often used."""
    env = {name: value for name, value in true_start().items() if name != "HYDRA_FULL_ERROR"}
    (path := tmp_path / "mine.py").write_text(f"import {module}{USERS}", encoding="utf-8")
    done = subprocess.run([sys.executable, path], env=env, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == ("True None" if module == "sys" else "False 1")
    assert re.search(r"Traceback (.*\n)+ +open\(.absent.\)\nFileNotFoundError.*\n$", done.stderr)


def test_fairseq_does_not_log_what_it_raises(caplog, monkeypatch):
    """Its hundreds of lines would hide the one that says what is wrong; its other lines stay."""
    monkeypatch.setattr("time.sleep", lambda _: None)  # before it tries again
    with pytest.raises(AttributeError, match="pickle"):
        checkpoint_utils.torch_persistent_save(lambda: None, os.devnull)
    with pytest.raises(MissingConfigException):
        convert_namespace_to_omegaconf(Namespace(bpe="characters"))
    checkpoint_utils.logger.warning("another line")
    assert [x.message for x in caplog.records if x.levelno > logging.INFO] == ["another line"]


def test_a_mistake_told_by_another_rank_is_one_line():
    text = "\n\n-- Process 1 terminated with the following error:\nTraceback ...\n"
    for kind, code in (("UserError", 2), ("RunError", 1)):
        trace = f"{text}fairseq_posenc.errors.{kind}: the mistake\n- its place\n\nDuring ...\n"
        error = ProcessRaisedException(trace, 1, 2)
        assert find_message(error) == "the mistake\n- its place"
        assert choose_exit_code(error) == code
