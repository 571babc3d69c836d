"""``fairseq-posenc plan``: what it reads from a log, and real probes of tiny trainings."""

from __future__ import annotations

import logging
import os
import re
import statistics
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from fairseq.utils import CudaEnvironment

from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.results.record import read
from fairseq_posenc.workbench.running.exit_codes import STOPPED
from fairseq_posenc.workbench.training import recipes
from fairseq_posenc.workbench.training.plan.command import _make_temporary_log, format_plan
from fairseq_posenc.workbench.training.plan.probe import ProbeLog, read_training
from tests.helpers import commands
from tests.helpers.commands import (
    FAMILIES,
    TRAINING,
    USER_DIR,
    new_directory,
    refused,
    run,
    sentences,
)
from tests.helpers.waiting import wait_until

slow = pytest.mark.slow
SCRIPTS = Path(__file__).resolve().parents[3] / "train_scripts"
LINE = (
    "2024-05-05 12:00:00 | INFO | train_inner | epoch 002:    {update:3d} / 40 loss=9.1, ppl=548, "
    "wps=123.4, ups=0.5, wpb={tokens}, bsz={sequences}, num_updates={update}, lr=1e-08, gnorm=2.1, "
    "train_wall=3, gb_free={free}, wall=9"
)


def line(update: int, tokens: float = 1000, sequences: int = 8, free: float = 50.0) -> str:
    return LINE.format(update=update, tokens=tokens, sequences=sequences, free=free)


# ------------------------------------------------------------------------------------ reading a log


def test_the_figures_are_medians_without_the_first_updates():
    watch, now = ProbeLog(), 100.0
    # Two slow updates at the start do not count, and one in the middle hardly does.
    for update, seconds in enumerate([60, 30, 2, 2, 50, 2, 4], start=1):
        now += seconds
        assert watch.read(line(update, tokens=1000 if seconds < 4 else 2000), now)
    figures = watch.measure(left_out=2)
    assert figures["seconds_per_update"] == 2
    assert figures["tokens_per_second"] == 500  # of 500, 500, 40, 500, 500
    assert figures["tokens_per_update"] == 1000
    assert (figures["sequences_per_update"], figures["updates_per_epoch"]) == (8, 40)


def test_memory_of_a_gpu_is_what_was_least_free(caplog):
    """The lines on the GPUs are fairseq's own."""
    gpu = SimpleNamespace(major=9, minor=0, total_memory_in_GB=79.25, name="NVIDIA A100")
    with caplog.at_level(logging.INFO):
        CudaEnvironment.pretty_print_cuda_env_list([gpu, gpu])
    watch = ProbeLog()
    for record in caplog.records:
        watch.read(f"2024-05-05 12:00:00 | INFO | fairseq.utils | {record.getMessage()}\n", 0)
    watch.read("2024 | INFO | fairseq_cli.train | training on 2 devices (GPUs/TPUs)", 0)
    for update, free in enumerate([70.0, 20.5, 60.0], start=1):
        watch.read(line(update, free=free), float(update))
    figures = watch.measure(left_out=1)
    assert (figures["devices"], figures["gpu"], figures["gpu_total"]) == (2, "NVIDIA A100", 79.25)
    assert figures["gpu_memory"] == 79.25 - 20.5


def test_a_log_without_updates_is_an_error():
    watch = ProbeLog()
    assert not watch.read("| train | epoch 001 | loss 5", 1)
    with pytest.raises(UserError, match="log has 0 updates, and the first 10 do not count"):
        watch.measure(left_out=10)


def test_half_precision_without_a_gpu_is_one_line(capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    told = refused(capsys, "plan", "--", "fairseq-train", "data-bin/wiki", "--fp16")
    assert "no GPU is visible: add --device cpu" in told


def test_large_numbers_as_fairseq_prints_them():
    watch = ProbeLog()
    for update in (1, 2):
        watch.read(line(update, tokens=2.09715e06), 10.0 * update)
    assert watch.measure(left_out=1)["tokens_per_second"] == pytest.approx(209715)


# ---------------------------------------------------------------------------------- which training


def test_the_probe_always_starts_and_never_touches_the_checkpoints():
    words = ["/bin/fairseq-train", "data", "--save-dir", "mine", "--restore-file=x.pt"]
    training = read_training([*words, "--max-update", "100", "--max-epoch", "0"])
    assert (training.max_update, training.max_epoch, training.recipe) == (100, None, None)
    assert training.save_dir == Path("mine")
    probe = training.build_probe(50, Path("elsewhere"))
    assert probe[0] == "fairseq-train"
    *_, last = [i for i, word in enumerate(probe) if word == "--save-dir"]
    assert probe[last + 1] == "elsewhere"
    *_, last = [i for i, word in enumerate(probe) if word == "--max-update"]
    assert probe[last + 1] == "50"
    assert "--reset-optimizer" in probe
    assert "--reset-optimizer" not in read_training(words[:4]).build_probe(50, Path("elsewhere"))


def script(text: str) -> str:
    path = new_directory() / "train.sh"
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere.sh", "x"], "nowhere.sh: No such file or directory; give a training script"),
        ([script("echo fairseq-train a; echo fairseq-train b")], "prints 2 fairseq-train commands"),
        ([script("echo nothing")], "prints 0 fairseq-train commands"),
        ([script("echo no GPU is visible >&2; exit 2")], "no GPU is visible"),
    ],
)
def test_what_starts_no_training_is_told(words, message):
    with pytest.raises(UserError, match=message):
        read_training(words)


def test_a_script_is_asked_for_its_command_with_the_options_where_they_belong():
    asked = script(
        '[ "$*" = "rope data --dry-run -- --max-update 7" ] && shift 4 && echo fairseq-train "$@"'
    )
    training = read_training([asked, "rope", "data", "--", "--max-update", "7"])
    assert training.command == ["fairseq-train", "--max-update", "7"]
    assert (training.max_update, training.recipe) == (7, None)


# -------------------------------------------------------------------------------------- real probes


@slow
def test_a_probe_of_a_command_agrees_with_its_log(tmp_path):
    log = tmp_path / "probe.log"
    family = FAMILIES["masked_lm"]
    command = ["fairseq-train", sentences(), "--user-dir", USER_DIR, *family.task, *family.model]
    command += [*TRAINING, "--max-update", 5000, "--save-dir", tmp_path / "mine"]
    began = time.monotonic()
    done = run("fairseq-posenc", "plan", "--updates", 21, "--json", "--log", log, "--", *command)
    took = time.monotonic() - began
    (tmp_path / "plan.json").write_text(done.out, encoding="utf-8")
    record = read(tmp_path / "plan.json")
    (plan,) = record.rows
    assert (record.kind, record.spec, record.seed) == ("plan", None, 1)
    text = log.read_text(encoding="utf-8")
    tokens = [float(each) for each in re.findall(r"train_inner .* wpb=([\d.e+]+),", text)]
    assert len(tokens) == 21
    assert plan["tokens_per_update"] == statistics.median(tokens[4:])
    assert plan["sequences_per_update"] == 16
    # All updates have as many tokens, and those that count are odd in number.
    seconds = plan["seconds_per_update"]
    assert plan["tokens_per_second"] == pytest.approx(plan["tokens_per_update"] / seconds)
    assert (plan["end"], plan["hours"]) == (5000, pytest.approx(5000 * seconds / 3600))
    # Half of the 17 updates that count took at least the median; all of it happened meanwhile.
    assert 0 < 9 * seconds < took
    assert "training on 1 devices" in text
    assert (plan["devices"], plan["gpu"], plan["gpu_memory"]) == (1, None, None)
    assert 0.1 < plan["process_memory"] < 4
    # The weights, and Adam's two averages of them.
    parameters = int(re.search(r"num. shared model params: ([\d,]+)", text)[1].replace(",", ""))
    assert 12 * parameters < plan["checkpoint_bytes"] < 13 * parameters + 200_000
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan.json", "probe.log"]


@slow
def test_a_probe_of_a_script_says_how_long_its_recipe_takes(tmp_path):
    tiny = ["--encoder-layers", 1, "--encoder-embed-dim", 16, "--encoder-ffn-embed-dim", 16]
    tiny += ["--encoder-attention-heads", 2, "--num-workers", 0]
    # A run that has gone far already is neither continued nor touched.
    last = tmp_path / "mine" / "checkpoint_last.pt"
    last.parent.mkdir(parents=True)
    last.write_text("not to be read", encoding="utf-8")
    options = ["none", sentences(), "--device", "cpu", "--out", last.parent, "--", *tiny]
    done = run(
        "fairseq-posenc", "plan", "--updates", 12, SCRIPTS / "b_small.sh", *options, cwd=tmp_path
    )
    rows = dict(re.split(r"  +", row, maxsplit=1) for row in done.out.splitlines())
    assert rows["probe"] == "12 updates on the processor; medians without the first 2"
    hours = float(rows["time"].split()[0].replace(",", ""))
    assert "for 200,000 updates" in rows["time"]
    # The rate is printed with three figures.
    rate = float(rows["updates per second"])
    assert hours == pytest.approx(200_000 / rate / 3600, rel=0.02)
    assert rows["the paper"] == "34.5 hours on 4 x A100-40GB"
    assert "global batch: 256 sequences" in done.err
    assert last.read_text(encoding="utf-8") == "not to be read"
    assert [path.name for path in last.parent.iterdir()] == [last.name]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name a training, for example"),
        (
            ["--lr", "1"],
            "unrecognized arguments: --lr; write after --: a fairseq-train command, or options "
            "that the script passes on",
        ),
        (["--updates", "3", "--", "fairseq-train", "x"], "--updates 3: a probe needs at least 10"),
        (
            [str(SCRIPTS / "b_small.sh"), "none", "nowhere", "--device", "cpu"],
            "nowhere: no such folder",
        ),
    ],
)
def test_mistakes_are_told_in_one_line(arguments, message, capsys):
    assert refused(capsys, "plan", *arguments).startswith(message)


@slow
def test_a_training_that_fails_is_told_by_its_own_error(capsys, tmp_path):
    log = str(tmp_path / "probe.log")
    words = ["plan", "--log", log, "--", "fairseq-train", "nowhere", "--arch", "x"]
    told = refused(capsys, *words, code=1)
    assert "invalid choice: 'x'" in told
    assert "invalid choice: 'x'" in Path(log).read_text(encoding="utf-8")


@slow
def test_a_probe_that_is_ended_leaves_nothing_running(tmp_path):
    log, family = tmp_path / "probe.log", FAMILIES["masked_lm"]
    command = ["fairseq-train", sentences(), "--user-dir", USER_DIR, *family.task, *family.model]
    command += [*TRAINING, "--save-dir", tmp_path / "mine"]
    words = ["plan", "--updates", 1_000_000, "--log", log, "--", *command]
    process = subprocess.Popen(
        [str(word) for word in (commands.script("fairseq-posenc"), *words)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_until(lambda: log.exists() and "begin training epoch" in log.read_text("utf-8"), process)
    process.terminate()
    assert process.stderr.read().splitlines()[-1].startswith("fairseq-posenc: stopped; ")
    assert process.wait() == STOPPED
    assert [path.name for path in tmp_path.iterdir()] == ["probe.log"]
    size = log.stat().st_size
    time.sleep(1)  # some hundred lines of the log, if the training were still running
    assert log.stat().st_size == size


def test_a_temporary_log_is_closed():
    before = set(os.listdir("/dev/fd"))
    log = _make_temporary_log()
    assert log.is_file()
    assert set(os.listdir("/dev/fd")) == before
    log.unlink()


# ------------------------------------------------------------------------------------------- text


def test_the_text_names_gpu_memory_and_days():
    plan = {
        "probe_updates": 50,
        "left_out": 10,
        "devices": 8,
        "gpu": "NVIDIA A100",
        "gpu_memory": 31.25,
        "gpu_total": 39.4,
        "process_memory": 4.0,
        "tokens_per_second": 400_000.0,
        "seconds_per_update": 0.25,
        "tokens_per_update": 49_152.0,
        "sequences_per_update": 96.0,
        "checkpoint_bytes": 1_250_000_000,
        "checkpoint_seconds": 2.5,
        "end": 500_000,
        "hours": 500_000 * 0.25 / 3600,
        "updates_per_epoch": 85_470,
        **{f"paper_{k}": v for k, v in recipes.build_recipe("a_small").hardware.items()},
    }
    text = format_plan(plan)
    assert "50 updates on 8 x NVIDIA A100; medians without the first 10" in text
    assert "31.2 of 39.4 GiB on a GPU; 4.0 GiB in the largest process" in text
    assert "34.7 hours (1.45 days) for 500,000 updates, or 5.85 epochs" in text
    assert "1,250.0 MB, written in 2.5 s" in text
    assert "30 hours on 8 x A100-40GB" in text
    long = format_plan({**plan, "hours": 4321.0})
    assert "4,321 hours (180 days)" in long
    assert "neither --max-update" in format_plan(
        {**plan, "end": None, "hours": None, "paper_hours": None}
    )
