"""``glue`` as users call it: a run resumed, chosen or reported otherwise than its data say."""

import shutil
from functools import cache
from operator import eq
from pathlib import Path
from typing import Any

import pytest
import torch

from fairseq_posenc.errors import UserError
from fairseq_posenc.folders import read_json
from fairseq_posenc.tasks.glue.definitions import TASKS
from fairseq_posenc.tasks.glue.task import GlueTask, GlueTaskConfig
from fairseq_posenc.workbench.cli import main
from fairseq_posenc.workbench.loading.checkpoints import updates_done
from fairseq_posenc.workbench.results import record
from tests.helpers.commands import (
    TRAINING,
    USER_DIR,
    call,
    halting,
    kill_command,
    made_once,
    new_directory,
    read_log,
    refused,
    run,
    script,
)
from tests.helpers.documented import own_encodings
from tests.helpers.glue_files import COLOURS, train_pieces, write_task
from tests.helpers.preprocess import start, write_squad
from tests.helpers.products import WHOLE, some_of
from tests.transformer.test_distributed import DISTRIBUTED, TORCHRUN

pytestmark = pytest.mark.slow
SIZES = {"train": 96, "valid": 29, "test": 7, "valid1": 13, "test1": 5, "test2": 6}
CHOSEN = ("MNLI", "CoLA", "STS-B")
EPOCHS = 8  # of 3 updates
SPEC, DIRECTIONS = "learned+m4m(max_distance=20)", "lr,rl"
OWN = "root"  # of a user's package
TINY = ["--encoder-layers", 2, "--encoder-embed-dim", 32, "--encoder-ffn-embed-dim", 32]
TINY += ["--encoder-attention-heads", 4]


def changed(*settings: str) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]


QUICK = changed("dataset.num_workers=0", "lr_scheduler.warmup_updates=2", "common.log_interval=5")


@made_once
def data() -> Path:
    """Return data-bins of three tasks, and of a text to pre-train on, in sentencepieces.

    A text tells its label by its colour, so a few updates are enough; in CoLA's development set, it
    tells the other one, so that the best checkpoint is an early one.
    """
    folder = new_directory()
    pieces = train_pieces(folder)
    for name in CHOSEN:
        write_task(folder / "raw", name, SIZES, wrong="valid" if name == "CoLA" else "")
    tokens = ["--sentencepiece-model", pieces]
    text = ["--train", folder / "pieces.txt", "--valid", folder / "pieces.txt", "--workers", 1]
    start("plain_text", *text, "--out", folder / "text", *tokens, "--longest-line", 39)
    tasks = ["--tasks", ",".join(CHOSEN), "--max-tokens", 40]
    start("glue", folder / "raw", "--out", folder / "glue", *tokens, *tasks)
    return folder


@made_once
def pretrained(spec: str) -> Path:
    """Return the checkpoint of a masked LM, trained for a moment."""
    folder = new_directory() / "tiny"
    user_dir = own_encodings() if spec == OWN else USER_DIR
    run(
        *("fairseq-train", data() / "text", "--user-dir", user_dir, "--task", "masked_lm"),
        *("--criterion", "masked_lm", "--arch", "decbert_diff_tiny", *TINY),
        *("--position-encoding", spec, "--tokens-per-sample", 40, "--sample-break-mode", "none"),
        *(*TRAINING, "--max-update", 2, "--save-dir", folder, "--no-epoch-checkpoints"),
    )
    return folder / "checkpoint_last.pt"


def arguments(protocol: str, *more: Any, tasks: str = "CoLA", spec: str = SPEC) -> list[str]:
    given = ["--checkpoint", pretrained(spec), "--data", data() / "glue", "--protocol", protocol]
    return [str(word) for word in ("glue", *given, "--tasks", tasks, *more)]


@pytest.fixture(autouse=True)
def _on_one_core(monkeypatch):  # results are compared for equality
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


RATE = ["--learning-rates", "3e-3"]
LONG = [*QUICK, *changed(f"optimization.max_epoch={EPOCHS}")]
SHORT = [*QUICK, *changed("optimization.max_epoch=1")]


@cache
def finished() -> Path:
    """Return the results of three tasks."""
    out = new_directory() / "results"
    given = arguments("m4m", *RATE, "--jobs", 2, "--out", out, *LONG, tasks=",".join(CHOSEN))
    assert main(given) == 0
    return out


def the_run(task: str) -> dict:
    """Return the only run of a task, as the record has it."""
    runs = record.read(finished() / "results.json").figures["runs"]
    (one,) = (run for run in runs if run["task"] == task)
    return dict(one)


def test_tasks_are_learnt_and_reported():
    results = record.read(finished() / "results.json")
    facts = (results.kind, results.data["name"], results.data["protocol"], results.spec)
    assert facts == ("glue", "tiny-checkpoint_last", "m4m", SPEC)
    assert results.data["attention_directions"] == DIRECTIONS
    metrics = [(row["task"], row["metric"]) for row in results.rows if row["reported"]]
    assert metrics == [("MNLI", "accuracy_m"), ("CoLA", "matthews"), ("STS-B", "spearman")]
    for row in results.rows:
        run = the_run(row["task"])
        assert row["best"] == row["mean"] == run[row["metric"]]
        assert row["task"] == "CoLA" or (row["best"] > 60 and not run["collapsed"])
        state = torch.load(Path(run["folder"]) / "checkpoint_best.pt", map_location="cpu")
        assert state["last_optimizer_state"] is None
        # The figure read from the disk is the one that chose it in training.
        best = state["extra_state"]["best"]
        assert not row["reported"] or best == pytest.approx(row["best"], abs=1e-3)
        log = Path(run["folder"], "train.log").read_text()
        assert f"encoder position encoding: {SPEC} | directions: lr x1 rl x1 |" in log
        assert f"loading pretrained model from {pretrained(SPEC)}" in log


def test_the_best_checkpoint_is_not_the_last():
    folder = finished() / "CoLA" / "lr0.003-seed1"
    found = read_log((folder / "train.log").read_text(), "valid_loss")
    scores = [each["valid_matthews"] for each in found]
    assert max(scores) > scores[-1] + 10
    result = read_json(folder / "result.json")
    assert result["update"] < found[-1]["valid_num_updates"]
    assert result["metrics"]["matthews"] == pytest.approx(max(scores), abs=0.01)


def test_predictions_for_the_test_sets_are_as_glue_takes_them():
    found = {}
    for name, size in {"CoLA": 7, "STS-B": 7, "MNLI-m": 7, "MNLI-mm": 5, "AX": 6}.items():
        text = (finished() / "submission" / f"{name}.tsv").read_text()
        head, *lines = [tuple(line.split("\t")) for line in text.splitlines()]
        assert head == ("index", "prediction")
        ids, found[name] = zip(*lines)
        assert ids == tuple(map(str, range(size)))
    raw = (data() / "raw" / "MNLI" / "test_mismatched.tsv").read_text().splitlines()[1:]
    said = dict(zip(COLOURS, TASKS["MNLI"].classes))
    truth = [next(said[word] for word in line.split() if word in said) for line in raw]
    assert sum(map(eq, found["MNLI-mm"], truth)) >= 3


def test_finished_runs_are_not_made_again_and_not_mixed_with_others(capsys):
    """What a kill after the result left is deleted: a training resumes from the checkpoints."""
    given, folder = arguments("m4m", *RATE, "--out", finished()), finished() / "CoLA/lr0.003-seed1"
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    shutil.copyfile(folder / "checkpoint_best.pt", folder / "checkpoint_last.pt")
    (folder / "checkpoint_best.pt.posenc-0123abcd").write_bytes(b"half")
    for unfinished in (1, 0):
        assert f"1 runs, {unfinished} of them not finished yet" in call(capsys, *given, *LONG)[1]
        assert sorted(folder.iterdir()) == sorted(before)
    for path in (folder / "result.json", folder / "train.log"):
        assert path.stat().st_mtime_ns == before[path]
    # The results have all runs of the folder.
    runs = record.read(finished() / "results.json").figures["runs"]
    assert [run["task"] for run in runs] == list(CHOSEN)
    said = refused(capsys, *given, *QUICK)
    assert "lr0.003-seed1: was made with other max_update: 24, not 9; other settings, " in said
    said = refused(capsys, *arguments("decbert", "--out", finished(), *QUICK))
    assert "was made with other protocol: m4m, not decbert; name" in said


def test_a_killed_run_goes_on_to_the_same_result(tmp_path, capsys):
    """It is killed once it has a checkpoint, and resumed."""
    given = arguments("m4m", *RATE, "--out", tmp_path, *LONG, tasks="STS-B")
    environment, halted = halting(tmp_path)
    folder = tmp_path / "STS-B" / "lr0.003-seed1"
    kill_command(given, halted.exists, folder, env=environment)
    assert not (folder / "result.json").exists()
    before = updates_done(folder)
    said = f"STS-B, learning rate 0.003, seed 1: resuming from update {before}"
    assert said in call(capsys, *given)[1]
    result = read_json(folder / "result.json")
    assert 0 < before < result["update"]
    assert f"(epoch {before // 3 + 1} @ {before} updates)" in (folder / "train.log").read_text()
    assert result == read_json(finished() / "STS-B" / "lr0.003-seed1" / "result.json")


@pytest.mark.parametrize("name", some_of(["STS-B"], ["CoLA", "STS-B"]))
def test_two_processes_measure_what_one_does(name):
    """29 examples in batches of 4: in the last round one of the processes has none."""
    one = the_run(name)
    done = run(
        *(*TORCHRUN, script("fairseq-train"), data() / "glue" / name, "--user-dir", USER_DIR),
        *("--task", "glue", "--criterion", "glue", "--arch", "decbert_diff_tiny", *TINY),
        *("--position-encoding", SPEC, "--max-positions", 40, *TRAINING, "--lr", 0),
        *("--restore-file", Path(one["folder"]) / "checkpoint_best.pt", "--reset-optimizer"),
        *("--reset-lr-scheduler", "--reset-meters", "--reset-dataloader", "--no-save"),
        *("--load-checkpoint-on-all-dp-ranks", "--max-update", 1, "--batch-size", 8),
        *("--batch-size-valid", 4, *DISTRIBUTED),
    )
    assert "training on 2 devices" in done.log
    (found,) = read_log(done.log, "valid_loss")
    rows = [row for row in record.read(finished() / "results.json").rows if row["task"] == name]
    assert rows
    for row in rows:
        assert found[f"valid_{row['metric']}"] == pytest.approx(row["best"], abs=1e-2)


def test_a_dry_run_shows_commands_and_writes_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = arguments("decbert", "--dry-run")
    said, _ = call(capsys, *given)
    labels = [line for line in said.splitlines() if line.startswith("# ")]
    assert labels[-1] == "# CoLA, learning rate 1e-05, seed 5: 5,336 updates"
    assert len(labels) == 5
    assert "--config-name=decbert_cola" in said
    assert not list(tmp_path.iterdir())
    # Data of another dictionary are refused.
    shutil.copytree(data() / "glue" / "CoLA", tmp_path / "CoLA")
    (tmp_path / "CoLA" / "input0" / "dict.txt").write_text("other 1\n")
    message = refused(capsys, *given, "--data", tmp_path)
    assert "make the data with the vocabulary of the pre-training: --dict" in message


def test_what_stops_a_training_is_shown_in_one_line(tmp_path, capsys):
    given = arguments("m4m", *RATE, "--out", tmp_path)
    for wrong in ("up", "down"):  # nothing was trained, so that the folder takes other settings
        setting = f"+model.attention_directions={wrong}"
        _, said = call(capsys, *given, *QUICK, *changed(setting), code=1)
        assert said.splitlines()[-1] == (
            "fairseq-posenc: error: 1 of 1 runs failed; the same command tries them again: CoLA, "
            f"learning rate 0.003, seed 1: fairseq-hydra-train: --attention-directions {wrong}: "
            f"unknown direction '{wrong}': choose both, lr or rl (its log: "
            f"{tmp_path}/CoLA/lr0.003-seed1/train.log)"
        )
        assert "INFO" not in said
    if WHOLE:
        assert main([*given, *SHORT]) == 0


def test_the_task_refuses_what_the_model_cannot_read_and_to_train_without_an_end():
    settings = GlueTaskConfig(data=str(data() / "glue" / "CoLA"), seed=1, max_update=0)
    with pytest.raises(UserError, match=r"optimization.max_update is 0: give, for example, the"):
        GlueTask.setup_task(settings)
    settings.max_update, settings.max_positions = 1, 8
    with pytest.raises(UserError, match="of 13 tokens and the model takes 8: make it with --max-t"):
        GlueTask.setup_task(settings)
    settings.data = str(data() / "text")
    with pytest.raises(UserError, match=r"describes no GLUE task .*; make it with fairseq-posenc"):
        GlueTask.setup_task(settings)


def run_own(*words: Any) -> None:
    """Run a command with a user's own package."""
    run("fairseq-posenc", *words, "--user-dir", own_encodings())


def test_glue_hands_the_users_own_package_on(tmp_path):
    run_own(*arguments("m4m", *RATE, *SHORT, "--out", tmp_path, spec=OWN))
    assert record.read(tmp_path / "results.json").spec == OWN
    assert (tmp_path / "submission" / "CoLA.tsv").is_file()


@pytest.mark.matrix
def test_squad_hands_the_users_own_package_on(tmp_path):
    raw, model = write_squad(tmp_path / "birds.json"), tmp_path / "run" / "checkpoint_last.pt"
    tokens = ["--sentencepiece-model", data() / "pieces.model", "--dict", data() / "text/dict.txt"]
    sizes = ["--max-length", 40, "--stride", 8, "--max-question", 12]
    start("squad", "--train", raw, "--valid", raw, *tokens, *sizes, "--out", tmp_path / "bin")
    given = ["--checkpoint", pretrained(OWN), "--data", tmp_path / "bin", "--out", model.parent]
    run_own("squad", "train", *given, *changed("dataset.num_workers=0"))
    run_own("squad", "predict", "--checkpoint", model, "--questions", raw, "--out", tmp_path)
    assert record.read(tmp_path / "score.json").spec == OWN
