"""``glue`` and ``squad`` as users call them: a run resumed, chosen or reported otherwise."""

import json
import math
import re
import shutil
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

from fairseq_posenc.folders import read_json
from fairseq_posenc.specs import parse
from fairseq_posenc.tasks.glue.definitions import TASKS
from fairseq_posenc.tasks.squad.databin import open_data_bin
from fairseq_posenc.tokens.squad_file import read_squad
from fairseq_posenc.workbench.cli import main
from fairseq_posenc.workbench.finetuning.squad.command import compose_training
from fairseq_posenc.workbench.loading.checkpoints import updates_done
from fairseq_posenc.workbench.loading.pretrained import read_pretrained
from fairseq_posenc.workbench.results import record
from tests.helpers import commands
from tests.helpers.commands import TRAINING, USER_DIR, call, made_once, new_directory, refused, run
from tests.helpers.documented import own_encodings
from tests.helpers.glue_files import COLORS, WORDS, write_task
from tests.helpers.preprocess import bpe_options, start, write_bpe, write_squad
from tests.helpers.products import some_of
from tests.transformer.test_distributed import DISTRIBUTED, TORCHRUN

pytestmark = pytest.mark.slow
SIZES = {"train": 96, "valid": 29, "test": 7, "valid1": 13, "test1": 5, "test2": 6}
CHOSEN = ("MNLI", "CoLA", "STS-B")
SPEC, DIRECTIONS = "learned+m4m(max_distance=20)", "lr"
OWN = "root"  # of a user's package
TINY: list[Any] = ["--arch", "decbert_diff_tiny", "--attention-directions", "lr"]
TINY += ["--encoder-layers", 2, "--encoder-embed-dim", 64, "--encoder-ffn-embed-dim", 128]
posenc = partial(run, "fairseq-posenc")


def changed(*settings: str) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]


METRIC = "checkpoint.best_checkpoint_metric=loss"
RATE = ["--learning-rates", "3e-3"]
QUICK = changed("dataset.num_workers=0", "lr_scheduler.warmup_updates=2", "common.log_interval=5")
LONG = [*QUICK, *changed("optimization.max_epoch=8")]  # of 3 updates

FACTS = [
    ("Zoë Müller", "Århus", "1912", "naïve physics"),
    ("Łukasz Żak", "Gdańsk", "1877", "the cello"),
    ("Søren Ødegård", "北京 (Běijīng)", "1933", "“modern” chess"),
    ("Ana Núñez", "A Coruña", "1850", "ﬁne arts"),
    ("İpek Çelik", "Eskişehir", "1901", "½-tone music 😀"),
]
TEXT = (
    "It is known that  {0} was born in {1} in the year {2}. For most of a life that was long, and "
    "rich in friends, the subject of study was {3}, no less."
)
ASKED = ("In which town was", "What was the year of", "Which subject of study had", "Who knows why")
# Of each text, 3 questions with an answer, 1 without.
QUESTIONS = {
    TEXT.format(name, *answers): [
        {"question": f"{asked} {name}?", "answers": found, "is_impossible": not found}
        for asked, found in zip(ASKED, [*([x] for x in answers), []])
    ]
    for name, *answers in FACTS
}


@made_once
def data():
    """Return raw files, and data-bins of three tasks of GLUE and of SQuAD, with one vocabulary.

    A text tells its label by its color, so a few updates are enough; in CoLA's development set, it
    tells the other one, so that the best checkpoint is an early one.
    """
    folder = new_directory()
    raw = write_squad(folder / "people.json", QUESTIONS, "v2.0")
    asked = [question["question"] for questions in QUESTIONS.values() for question in questions]
    tokens = bpe_options(write_bpe(folder, [*QUESTIONS, *asked, " ".join(WORDS)], merges=400))
    for name in CHOSEN:
        write_task(folder / "raw", name, SIZES, wrong="valid" if name == "CoLA" else "")
    tasks = ["--tasks", ",".join(CHOSEN), "--max-tokens", 48]
    start("glue", folder / "raw", "--out", folder / "glue", *tokens, *tasks)
    sizes = ["--max-length", 48, "--stride", 16, "--max-question", 16]
    words = ["--train", raw, "--valid", raw, "--out", folder / "squad", *sizes, *tokens]
    said = posenc("preprocess", "squad", *words).out
    assert "0 questions left out, 0 answers moved, 0 answers in no window" in said
    assert "exists already, made from the same inputs" in posenc("preprocess", "squad", *words).err
    return folder


@made_once
def pretrained(spec):
    """Return the checkpoint of a masked LM, trained for a moment on the sentences of a task."""
    options = [*TINY, "--max-positions", 48, "--tokens-per-sample", 48, "--max-update", 2]
    places = {"data": data() / "glue/CoLA/input0", "save_dir": new_directory() / "tiny"}
    places["user_dir"] = own_encodings() if spec == OWN else USER_DIR
    commands.train("masked_lm", *options, "--position-encoding", spec, **places)
    return places["save_dir"] / "checkpoint_last.pt"


def arguments(protocol: str, *more: Any, tasks: str = "CoLA", spec: str = SPEC) -> list[str]:
    given = ["--checkpoint", pretrained(spec), "--data", data() / "glue", "--protocol", protocol]
    return [str(word) for word in ("glue", *given, "--tasks", tasks, *more)]


@pytest.fixture(autouse=True)
def _on_one_core(monkeypatch):  # results are compared for equality
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@cache
def finished() -> Path:
    """Return the results of three tasks."""
    out = new_directory() / "results"
    given = arguments("m4m", *RATE, "--jobs", 2, "--out", out, *LONG, tasks=", ".join(CHOSEN))
    assert main(given) == 0
    return out


def results() -> Any:
    return record.read(finished() / "results.json")


def test_tasks_are_learned_and_reported():
    found = results()
    facts = (found.kind, found.data["name"], found.data["protocol"], found.spec)
    assert facts == ("glue", "tiny-checkpoint_last", "m4m", SPEC)
    assert found.data["attention_directions"] == DIRECTIONS
    metrics = [(row["task"], row["metric"]) for row in found.figures["tasks"] if row["reported"]]
    assert metrics == [("MNLI", "accuracy_m"), ("CoLA", "matthews"), ("STS-B", "spearman")]
    runs = {run["task"]: run for run in found.figures["runs"]}
    assert len(found.figures["runs"]) == 3
    for row in found.figures["tasks"]:
        run = runs[row["task"]]
        assert row["best"] == row["mean"] == run[row["metric"]]
        assert row["task"] == "CoLA" or (row["best"] > 60 and not run["collapsed"])
        state = torch.load(Path(run["folder"], "checkpoint_best.pt"), map_location="cpu")
        assert state["last_optimizer_state"] is None
        assert state["optimizer_history"][-1]["num_updates"] == run["update"]
        assert row["task"] != "CoLA" or run["update"] < 24  # an early one
        # The figure read from the disk is the one that chose it in training.
        best = state["extra_state"]["best"]
        assert not row["reported"] or best == pytest.approx(row["best"], abs=1e-3)
        log = Path(run["folder"], "train.log").read_text()
        assert f"encoder position encoding: {SPEC} | directions: lr x1 both x1 |" in log
        assert f"loading pretrained model from {pretrained(SPEC)}" in log


def test_predictions_for_the_test_sets_are_as_glue_takes_them():
    found = {}
    for name, size in {"CoLA": 7, "STS-B": 7, "MNLI-m": 7, "MNLI-mm": 5, "AX": 6}.items():
        text = (finished() / "submission" / f"{name}.tsv").read_text()
        head, *lines = [tuple(line.split("\t")) for line in text.splitlines()]
        assert head == ("index", "prediction")
        ids, found[name] = zip(*lines)
        assert ids == tuple(map(str, range(size)))
    raw = (data() / "raw" / "MNLI" / "test_mismatched.tsv").read_text().splitlines()[1:]
    said = dict(zip(COLORS, TASKS["MNLI"].classes))
    truth = [next(said[word] for word in line.split() if word in said) for line in raw]
    assert sum(a == b for a, b in zip(found["MNLI-mm"], truth)) >= 3


def test_finished_runs_are_not_made_again_and_not_mixed_with_others(capsys):
    """What a kill after the result left is deleted: a training resumes from the checkpoints."""
    given, folder = arguments("m4m", *RATE, "--out", finished()), finished() / "CoLA/lr0.003-seed1"
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    shutil.copyfile(folder / "checkpoint_best.pt", folder / "checkpoint_last.pt")
    (folder / "checkpoint_best.pt.posenc-0123abcd").write_bytes(b"half")
    for unfinished in (1, 0):
        assert f"1 run, not finished yet: {unfinished}; results" in call(capsys, *given, *LONG)[1]
        assert sorted(folder.iterdir()) == sorted(before)
    for path in (folder / "result.json", folder / "train.log"):
        assert path.stat().st_mtime_ns == before[path]
    # The results have all runs of the folder.
    assert [run["task"] for run in results().figures["runs"]] == list(CHOSEN)
    said = refused(capsys, *given, *QUICK)
    assert "lr0.003-seed1: was made with other max_update: 24, not 9; other settings, " in said
    said = refused(capsys, *arguments("decbert", "--out", finished(), *QUICK))
    assert "was made with other protocol: m4m, not decbert; name" in said


def test_a_killed_run_goes_on_to_the_same_result(tmp_path, capsys):
    """It is killed once it has a checkpoint, and resumed."""
    given = arguments("m4m", *RATE, "--out", tmp_path, *LONG, tasks="STS-B")
    environment, halted = commands.halting(tmp_path)
    folder = tmp_path / "STS-B" / "lr0.003-seed1"
    commands.kill_command(given, halted.exists, folder, env=environment)
    assert not (folder / "result.json").exists()
    before = updates_done(folder)
    said = f"STS-B, learning rate 0.003, seed 1: resuming from update {before}"
    assert said in call(capsys, *given)[1]
    result = read_json(folder / "result.json")
    assert 0 < before < result["update"]
    assert f"(epoch {before // 3 + 1} @ {before} updates)" in (folder / "train.log").read_text()
    assert result == read_json(finished() / "STS-B" / "lr0.003-seed1" / "result.json")
    # As after a kill between training and evaluation: it is only evaluated.
    (folder / "result.json").unlink()
    torch.save({"optimizer_history": [{"num_updates": 24}]}, folder / "checkpoint_last.pt")
    call(capsys, *given)
    assert result == read_json(folder / "result.json")


@pytest.mark.parametrize("name", some_of(["STS-B"], ["CoLA", "STS-B"]))
def test_two_processes_measure_what_one_does(name):
    """29 examples in batches of 4: in the last round one of the processes has none."""
    best = finished() / name / "lr0.003-seed1" / "checkpoint_best.pt"
    done = run(
        *(*TORCHRUN, commands.script("fairseq-train"), data() / "glue" / name),
        *("--user-dir", USER_DIR, "--task", "glue", "--criterion", "glue", *TINY),
        *("--position-encoding", SPEC, "--max-positions", 48, *TRAINING, "--lr", 0),
        *("--restore-file", best, "--reset-optimizer", "--reset-lr-scheduler", "--reset-meters"),
        *("--reset-dataloader", "--no-save", "--load-checkpoint-on-all-dp-ranks"),
        *("--max-update", 1, "--batch-size", 8, "--batch-size-valid", 4, *DISTRIBUTED),
    )
    assert "training on 2 devices" in done.log
    (found,) = commands.read_log(done.log, "valid_loss")
    rows = [row for row in results().figures["tasks"] if row["task"] == name]
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
    message = refused(capsys, *given, "--learning-rates", "1e-5,-1e-5")
    assert "--learning-rates: 1e-5,-1e-5: write numbers above 0, as in 0.001,0.003 (" in message
    # All runs would have this seed, or rate, whatever their names; this metric is not reported.
    seed, place = "common.seed=7", "checkpoint.save_dir=x"
    for settings in ([seed, place], [place, seed], ["++optimization.lr=[1]"], [METRIC]):
        said = refused(capsys, *given, *changed(*settings))  # the first one is named
        assert said.startswith(f"--set {settings[0].strip('+').partition('=')[0]}: ")
    # Data of another dictionary are refused.
    shutil.copytree(data() / "glue" / "CoLA", tmp_path / "CoLA")
    (tmp_path / "CoLA" / "input0" / "dict.txt").write_text("other 1\n")
    message = refused(capsys, *given, "--data", tmp_path)
    assert "make the data with the vocabulary of the pre-training: --dict" in message


def test_what_stops_a_training_is_shown_in_one_line(tmp_path, capsys, monkeypatch):
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
    monkeypatch.setenv("PATH", str(tmp_path))  # has no Slurm
    _, said = call(capsys, *given, *QUICK, "--on", "slurm", "time=1", code=2)
    assert "--on slurm: squeue does not answer" in said
    (tmp_path / "RTE/old").mkdir(parents=True)
    (tmp_path / "RTE/old/request.json").write_text("{}")
    assert "RTE/old: is a run of another version" in refused(capsys, *given, *QUICK)
    assert not [*tmp_path.rglob("train.log")]


def test_the_users_own_package_is_handed_on(tmp_path):
    own, model = ["--user-dir", own_encodings()], tmp_path / "run" / "checkpoint_last.pt"
    short = [*QUICK, *changed("optimization.max_epoch=1")]
    posenc(*arguments("m4m", *RATE, *short, "--out", tmp_path, spec=OWN), *own)
    assert record.read(tmp_path / "results.json").spec == OWN
    assert (tmp_path / "submission" / "CoLA.tsv").is_file()
    posenc(*train_words(model.parent, "optimization.max_epoch=1", spec=OWN), *own)
    given = ["--checkpoint", model, "--questions", data() / "people.json", "--out", tmp_path]
    posenc("squad", "predict", *given, *own)
    assert record.read(tmp_path / "score.json").spec == OWN


EPOCHS = 45
SETTINGS = [
    *("dataset.batch_size=8", "dataset.num_workers=0", "dataset.disable_validation=true"),
    *("optimization.update_freq=[1]", "optimization.lr=[3e-3]", f"optimization.max_epoch={EPOCHS}"),
    *("model.dropout=0", "model.attention_dropout=0"),
    *("checkpoint.save_interval=10", "checkpoint.save_interval_updates=0"),
]


def train_words(out, *more, spec=SPEC):
    given = ["--checkpoint", pretrained(spec), "--data", data() / "squad", "--out", out]
    return ["squad", "train", *given, *changed(*SETTINGS, *more)]


@made_once
def trained():
    """Return a model whose training was killed after its first checkpoint, and then went on.

    While it trains, another command in its folder is refused.
    """
    out = new_directory() / "a run"
    environment, halted = commands.halting(out)

    def is_refused():
        if halted.exists():
            second = posenc(*train_words(out), fails=True).error()
            assert re.match(rf"{out}: process \d+ on .*, since ", second)
        return halted.exists()

    commands.kill_command(train_words(out), is_refused, out, env=environment)
    return out, posenc(*train_words(out)).err


def test_a_training_goes_on_where_it_was_interrupted():
    out, said = trained()
    log = (out / "train.log").read_text(encoding="utf-8")
    assert "span_head.scores.weight starts fresh" in log
    assert f"Loaded checkpoint {out}/checkpoint_last.pt (epoch " in log
    assert log.count("loading pretrained model from") == 1
    assert f"encoder position encoding: {SPEC} | directions: lr x1 both x1 |" in log
    assert f"{out}: resuming from update " in said
    assert f"next: fairseq-posenc squad predict --checkpoint '{out}/checkpoint_last.pt' ..." in said
    state = torch.load(out / "checkpoint_last.pt")
    windows = open_data_bin(data() / "squad").train_windows
    assert state["optimizer_history"][-1]["num_updates"] == EPOCHS * math.ceil(windows / 8)
    assert windows > 20  # some paragraphs are longer than a window


def test_twenty_questions_learned_by_heart_are_answered(tmp_path):
    raw = data() / "people.json"
    given = ["--checkpoint", trained()[0] / "checkpoint_last.pt", "--questions", raw]
    printed = posenc("squad", "predict", *given, "--out", tmp_path).out
    figures = json.loads(printed)
    assert figures["total"] == 20
    assert figures["exact"] >= 95
    assert figures["HasAns_exact"] >= 93
    assert figures["best_exact"] >= figures["exact"]
    names = ("predictions", "answers", "null_odds", "score")
    found = {name: read_json(tmp_path / f"{name}.json") for name in names}
    assert found["score"]["spec"] == SPEC
    assert found["score"]["figures"] == {"scores": [figures]}
    for question in read_squad(raw).questions:
        answer, odds = found["answers"][question.id], found["null_odds"][question.id]
        assert found["predictions"][question.id] == ("" if odds > 0 else answer)
        assert answer in question.context
        assert answer

    # The official figures of the written files are those that were printed.
    score = ["squad", "score", raw]
    odds = ["--na-prob-file", tmp_path / "null_odds.json", "--na-prob-thresh", 0]
    assert posenc(*score, tmp_path / "answers.json", *odds).out == printed
    plain = json.loads(posenc(*score, tmp_path / "predictions.json").out)
    assert plain == {key: value for key, value in figures.items() if "best" not in key}
    # Of a test set there are no scores, nor any of an earlier call.
    given[-1] = write_squad(tmp_path / "test.json", {"It is.": [{}]})
    posenc("squad", "predict", *given, "--out", tmp_path)
    assert [name for name in names if (tmp_path / f"{name}.json").exists()] == ["predictions"]


def test_wrong_input_is_shown_in_one_line(tmp_path, capsys):
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "m4.json").write_text("3")
    model = ["--checkpoint", pretrained(SPEC)]
    predict = ["squad", "predict", *model, "--questions", data() / "people.json"]
    assert "was not fine-tuned on SQuAD" in refused(capsys, *predict, "--out", tmp_path)
    (tmp_path / "manifest.json").symlink_to(tmp_path / "manifest.json")
    other = refused(capsys, *train_words(tmp_path), "--data", tmp_path)
    assert re.search(r"was not made by fairseq-posenc preprocess squad \(.*symbolic links", other)
    other = refused(capsys, *train_words(trained()[0], "common.seed=2"))
    assert "was made with other common, seed: 1, not 2; name another folder" in other
    (tmp_path / "request.json").write_text('{"updates": 9}')  # of another command's folder
    assert "was made by another command or version" in refused(capsys, *train_words(tmp_path))
    assert read_json(tmp_path / "results" / "m4.json") == 3  # nothing was deleted


def configured(spec=SPEC, version="1.1", changes=()):
    model = read_pretrained(pretrained(SPEC))._replace(spec=parse(spec))
    data_bin = open_data_bin(data() / "squad")._replace(version=version, train_windows=87_777)
    return compose_training(model, data_bin, Path("run"), changes)[0]


@pytest.mark.parametrize("version", ["1.1", "2.0"])
def test_the_recipe_is_the_papers(version):
    found = configured(version=version)
    assert (found.optimization.lr, found.optimization.max_epoch) == ([3e-5], 2)
    assert found.dataset.batch_size * found.optimization.update_freq[0] == 48
    updates = 2 * math.ceil(math.ceil(87_777 / 12) / 4)
    assert (found.optimization.max_update, found.lr_scheduler.warmup_updates) == (updates, 219)
    assert (found.model._name, found.model.encoder_layers) == ("decbert_diff_tiny", 2)
    assert (found.model.dropout, found.optimizer.weight_decay) == (0.1, 0.01)
    assert found.common.fp16
    assert found.checkpoint.finetune_from_model == str((pretrained(SPEC)).resolve())
    # Four GPUs share the batch.
    options = ["distributed_training.distributed_world_size=4", "optimization.update_freq=[1]"]
    assert configured(version=version, changes=options).optimization.max_update == updates


def test_encodings_that_diverged_have_a_smaller_rate_unless_the_user_sets_one():
    """M4M's paper, section 5.3: Raffel diverged at 3e-5, and TUPE "suffers from the same issue"."""
    for encoding in ("raffel", "tupe(tie_projections=true)", "raffel(per_head=true)+learned"):
        assert configured(encoding).optimization.lr == [2.5e-5]
    assert configured("raffel", changes=["optimization.lr=[1e-4]"]).optimization.lr == [1e-4]
