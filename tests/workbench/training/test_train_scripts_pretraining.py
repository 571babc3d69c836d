"""``train``, ``ablation`` and the YAML files, field by field against the recipes."""

from __future__ import annotations

import io
import json
import os
import shlex
import shutil
import subprocess
from argparse import Namespace
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from fairseq import options
from fairseq.dataclass.initialize import add_defaults, hydra_init
from omegaconf import OmegaConf

from docs.generate import yaml_files
from fairseq_posenc import specs
from fairseq_posenc.transformer.options import resolve_positions
from fairseq_posenc.workbench.cli import main
from fairseq_posenc.workbench.training import recipes
from fairseq_posenc.workbench.training.recipes.composing import compose_file
from fairseq_posenc.workbench.training.train.runs import RunIdentity
from tests.helpers.commands import (
    USER_DIR,
    kill_in_training,
    new_directory,
    run,
    sentences,
    trained,
)
from tests.helpers.waiting import free_ports

slow = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[3]
SCRIPTS = ROOT / "train_scripts"
CONFIGS = SCRIPTS / "configs"
PRETRAINING = recipes.load()["pretraining"]
NAMES = list(PRETRAINING)
ABLATIONS = recipes.load()["ablations"]
RUNS = [
    (name, encoding, directions)
    for name, recipe in PRETRAINING.items()
    for encoding in recipe["position_encodings"]
    for directions in recipe["attention_directions"]
]


def environment(**more: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    return {**clean, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", **more}


def start(name: str, *arguments: Any, status: int = 0, cwd: Path | None = None, **variables: str):
    """Run a script as users do."""
    done = subprocess.run(
        [str(SCRIPTS / f"{name}.sh"), *map(str, arguments)],
        cwd=cwd or new_directory(),
        env=environment(**variables),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status, done.stdout[-3000:] + done.stderr[-3000:]
    return done


def call(*words: Any, status: int = 0, cwd: Path | None = None, gpus: int = 0, **variables: str):
    """Call the command in this process, where a start of it costs nothing; return what it said."""
    out, err, here = io.StringIO(), io.StringIO(), Path.cwd()
    os.chdir(cwd or new_directory())
    try:
        with (
            redirect_stdout(out),
            redirect_stderr(err),
            patch.dict(os.environ, environment(**variables), clear=True),
            patch("torch.cuda.device_count", return_value=gpus),
        ):
            code: object = main([str(word) for word in words])
    except SystemExit as refused:  # an option that there is not
        code = refused.code
    finally:
        os.chdir(here)
    assert code == status, err.getvalue()
    return out.getvalue(), err.getvalue()


def refusal(*words: Any, **how: Any) -> str:
    """Read why a command did not start."""
    out, err = call(*words, status=2, **how)
    assert out == ""
    return err.splitlines()[-1]


def options_of(name: str, directions: str = "both") -> list[str]:
    """List the arguments of a recipe beside the encoding and the data."""
    models = recipes.build_recipe(name).has_models
    own = ["--model", recipes.find_model(directions)] if models else []
    init = PRETRAINING[name]["init"].startswith("roberta")
    return [*own, "--init", __file__] if init else own


def dry_run(name: str, encoding: str, *more: Any, **how: Any) -> tuple[list[str], str]:
    data = how.pop("data", sentences())
    end = more.index("--") if "--" in more else len(more)
    words = ["train-recipe", name, encoding, data, *more[:end], "--dry-run", *more[end:]]
    out, err = call(*words, **how)
    return shlex.split(out), err


def settings(words: list[str]) -> Namespace:
    """Return the settings that fairseq-train understands the command as."""
    (program,) = [i for i, word in enumerate(words) if word.endswith("/fairseq-train")]
    parser = options.get_training_parser()
    return options.parse_args_and_arch(parser, input_args=words[program + 1 :])


def plain(value: Any) -> Any:
    """Return a value as a recipe has it: some options of fairseq keep numbers as text."""
    if isinstance(value, list):
        return [plain(each) for each in value]
    try:
        return float(value)
    except (TypeError, ValueError):
        return str(value)


def of_recipe(name: str) -> dict[str, Any]:
    return {key: plain(v) for key, v in recipes.build_recipe(name).all_settings.items()}


# ------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(("name", "encoding", "directions"), RUNS)
def test_the_settings_are_the_recipes(name, encoding, directions):
    words, said = dry_run(name, encoding, *options_of(name, directions), "--gpus", 1)
    args = settings(words)
    expected = of_recipe(name)
    assert {key: plain(getattr(args, key)) for key in expected} == expected
    position = resolve_positions(args)
    assert position.encoder == specs.parse(encoding)
    if name != "b_lm":
        assert ",".join(position.directions or ["both"]) == directions
    assert args.no_epoch_checkpoints
    assert args.save_interval_updates >= 1000
    (update_freq,) = args.update_freq
    batch = recipes.build_recipe(name).batch
    assert args.batch_size * update_freq == batch
    assert f"global batch: {batch} sequences = 1 GPU(s) x" in said


@pytest.mark.parametrize("gpus", [1, 2, 8, 32])
@pytest.mark.parametrize("name", NAMES)
def test_the_global_batch_stays_whatever_the_gpus(name, gpus):
    encoding = PRETRAINING[name]["position_encodings"][0]
    nodes = ["--gpus", 8, "--nodes", 4, "--head", "node0:29500"] if gpus == 32 else ["--gpus", gpus]
    words, said = dry_run(name, encoding, *options_of(name), *nodes)
    args = settings(words)
    batch, (update_freq,) = recipes.build_recipe(name).batch, args.update_freq
    assert args.distributed_world_size == gpus
    assert args.batch_size * update_freq * gpus == batch
    assert f"{batch} sequences = {gpus} GPU(s) x {args.batch_size} x {update_freq} steps" in said


@pytest.mark.filterwarnings("ignore::UserWarning")  # hydra on how fairseq uses it
@pytest.mark.parametrize("name", NAMES)
def test_the_yaml_file_is_the_recipe_too(name):
    """Composed as fairseq-hydra-train does, with fairseq's defaults."""
    encoding = PRETRAINING[name]["position_encodings"][0]
    overrides = ["task.data=data", f"model.position_encoding={encoding}"]
    if PRETRAINING[name]["init"].startswith("roberta"):
        overrides.append("checkpoint.finetune_from_model=init.pt")
    hydra_init(name)
    config = compose_file(CONFIGS / f"{name}.yaml", overrides)
    add_defaults(config)
    config.checkpoint.save_dir = "-"  # has hydra's working directory, which is not set here
    found: dict[str, Any] = {}
    sections = OmegaConf.to_container(config, resolve=True, enum_to_str=True)
    for key in ("common", "task", "model", "dataset", "optimization", "optimizer", "lr_scheduler"):
        found.update(sections[key])
    for key in ("task", "optimizer", "lr_scheduler", "criterion"):
        choice = sections[key]
        found[key] = choice["_name"] if isinstance(choice, dict) else choice
    expected = of_recipe(name)
    assert {key: plain(found.get(key)) for key in expected} == expected
    gpus, (update_freq,) = config.distributed_training.distributed_world_size, found["update_freq"]
    assert gpus == PRETRAINING[name]["hardware"]["gpus"]
    assert gpus * found["batch_size"] * update_freq == recipes.build_recipe(name).batch
    args = settings(dry_run(name, encoding, *options_of(name), "--gpus", 1)[0])
    same = ("no_epoch_checkpoints", "save_interval_updates", "keep_interval_updates")
    assert {key: config.checkpoint[key] for key in same} == {k: getattr(args, k) for k in same}


def test_the_yaml_files_are_those_of_the_recipes():
    """None is out of date, and none is left over."""
    texts = yaml_files.format_files(ROOT)
    there = {*CONFIGS.glob("*.yaml"), *(ROOT / "finetune_configs").rglob("*.yaml")}
    assert there == set(texts)
    for path, text in texts.items():
        assert path.read_text(encoding="utf-8") == text, f"{path}: run make docs"


@pytest.mark.parametrize("name", [*recipes.list_trainings(), "ablation"])
def test_a_script_is_the_command_with_its_name(name):
    text = (SCRIPTS / f"{name}.sh").read_text(encoding="utf-8")
    command = "ablation" if name == "ablation" else f"train-recipe {name}"
    assert text.splitlines()[-1] == f'exec fairseq-posenc {command} "$@"'


@slow
def test_a_script_hands_on_all_that_it_is_given():
    data = sentences()
    done = start("b_small", "rope(base=500)", data, "--gpus", 1, "--dry-run", "--", "--lr", "1e-3")
    words = shlex.split(done.stdout)
    own = ["--gpus", 1, "--", "--lr", "1e-3"]
    in_process, _ = dry_run("b_small", "rope(base=500)", *own)
    for each in (words, in_process):  # the package may be found by way of a link
        each[each.index("--user-dir") + 1] = str(Path(each[each.index("--user-dir") + 1]).resolve())
    assert words[1:] == in_process[1:]
    assert words[-2:] == ["--lr", "1e-3"]
    assert (
        "is not a data-bin folder"
        in start("b_small", "learned", ".", "--device", "cpu", status=2).stderr
    )


# -------------------------------------------------------------------------------- data and start


def shards(count: int) -> Path:
    folder = new_directory() / "text"
    for number in range(count):
        shutil.copytree(sentences(), folder / f"shard{number}")
    return folder


def test_shards_are_given_as_a_folder_or_joined_by_colons():
    folder = shards(3)
    joined = ":".join(str(folder / f"shard{number}") for number in range(3))
    for data in (folder, joined):
        words, _ = dry_run("a_c4", "m4m", "--device", "cpu", data=data)
        args = settings(words)
        assert (args.data, args.save_dir) == (joined, "checkpoints/a_c4/text/m4m")


def test_shards_that_do_not_fit_together_are_refused():
    folder = shards(2)
    (folder / "shard1" / "dict.txt").write_text("other 1\n", encoding="utf-8")
    told = refusal("train-recipe", "a_c4", "m4m", folder, "--device", "cpu")
    assert "shard1/dict.txt differs from that of" in told
    folder = shards(1)
    (folder / "shard1.partial").mkdir()
    told = refusal("train-recipe", "a_c4", "m4m", folder, "--device", "cpu")
    assert "shard1.partial is not finished" in told


def test_some_of_the_shards_are_not_the_whole_corpus():
    folder = shards(2)
    for number, other in ((0, 0), (1, 2)):
        (folder / f"shard{number}").rename(folder / f"shard{other}-of-4")
    told = refusal("train-recipe", "a_c4", "m4m", folder, "--device", "cpu")
    assert "shard0-of-4 is one of 4 shards, but there are 2" in told


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("a_base", ["--gpus", 1], "this recipe starts from a released RoBERTa: name a checkpoint"),
        ("a_large", ["--gpus", 1], "this recipe starts from a released RoBERTa: name a checkpoint"),
        ("a_base", ["--gpus", 1, "--init", "nowhere.pt"], "--init nowhere.pt does not exist"),
        (
            "a_small",
            ["--device", "cpu", "--init", "x.pt"],
            "a_small starts from new weights: leave",
        ),
        (
            "a_small",
            ["--model", "bert"],
            "--model: the recipe a_small has a single model; leave it out",
        ),
        ("b_small", ["--model", "bart"], "argument --model: invalid choice: 'bart'"),
        (
            "b_small",
            ["--device", "cpu", "--", "--save-dir", "x"],
            "--save-dir: name the folder with --out, before the two dashes",
        ),
        (
            "b_small",
            ["--device", "cpu", "--seeds", "1,2", "--", "--seed=3"],
            "--seed: name the seeds with --seeds 1,2",
        ),
        ("b_small", ["--gpus", 3], "a batch of 256 sequences cannot be made of steps of 3 (3 x 1)"),
        ("b_lm", ["--gpus", 3], "a batch of 128 sequences cannot be made of steps of 3 (3 x 1)"),
        ("b_small", ["--gpus", 1, "--nodes", 2], "--nodes 2 needs --head HOST:PORT outside Slurm"),
        (
            "b_lm",
            ["--device", "cpu", "--gpus", 2],
            "--device cpu excludes --gpus, --fp16 and --bf16",
        ),
        (
            "b_lm",
            ["--device", "cpu", "--bf16"],
            "--device cpu excludes --gpus, --fp16 and --bf16",
        ),
        ("b_lm", ["--gpus"], "argument --gpus: expected one argument"),
        ("b_lm", ["--gpus", 0], "argument --gpus: must be a whole number of at least 1, not '0'"),
        ("b_lm", ["--per-gpu", "x"], "argument --per-gpu: must be a whole number of at least 1"),
        ("b_lm", ["--lr", 1], "unrecognized arguments: --lr 1"),
        ("b_lm", [], "no GPU is visible; --device cpu trains on the processor, slowly"),
    ],
)
def test_wrong_arguments_are_told_in_one_line(name, arguments, message):
    told = refusal("train-recipe", name, "learned", sentences(), *arguments)
    assert told.removeprefix("fairseq-posenc").partition("error: ")[2].startswith(message)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a_huge", "learned", "x"], "argument RECIPE: invalid choice: 'a_huge' (choose from"),
        (["b_lm", "learned"], "the following arguments are required: DATA"),
        (["b_lm", "learned", "nowhere", "--device", "cpu"], "nowhere: no such folder"),
        (["b_lm", "leant", "x", "--device", "cpu"], "unknown position encoding 'leant'"),
    ],
)
def test_what_is_not_there_is_told_in_one_line(words, message):
    assert message in refusal("train-recipe", *words)


def test_without_a_gpu_a_dry_run_shows_the_command_for_one():
    words, said = dry_run("b_small", "learned")
    assert "no GPU is visible: this is the command for one GPU" in said
    assert settings(words).distributed_world_size == 1
    assert settings(dry_run("b_small", "learned", gpus=4)[0]).distributed_world_size == 4


@pytest.mark.parametrize(("gpus", "each"), [(1, 16), (2, 16), (4, 32), (8, 4), (8, 16)])
def test_a_gpu_takes_what_the_user_says_and_several_run_under_torchrun(gpus, each):
    words, _ = dry_run("b_lm", "learned", "--gpus", gpus, "--per-gpu", each)
    args = settings(words)
    assert (args.batch_size, args.update_freq) == (each, [128 // (gpus * each)])
    launcher = [Path(word).name for word in words[: words.index(str(sentences()))]]
    several = ["torchrun", "--standalone", f"--nproc_per_node={gpus}", "fairseq-train"]
    assert launcher == (["fairseq-train"] if gpus == 1 else several)


def test_the_users_options_come_last():
    own = ["--device", "cpu", "--out", "a b", "--", "--lr", "1e-3", "--seed", 7]
    args = settings(dry_run("b_lm", "learned", *own)[0])
    assert (args.cpu, args.fp16) == (True, False)
    assert (args.lr, args.seed, args.save_dir) == ([1e-3], 7, "a b")
    assert settings(dry_run("b_lm", "learned", "--gpus", 1, "--bf16")[0]).bf16


@pytest.mark.parametrize(
    ("words", "folder"),
    [
        (["b_lm", "learned"], "learned"),
        (["b_lm", "m4(reset=true, max_distance=8)"], "m4-max_distance=8-reset=true"),
        (["b_lm", "rope(scaling=ntk:4,base=10000)"], "rope-scaling=ntk-4"),
        (["b_small", "none"], "bert-none"),
        (["b_small", "none", "--model", "decbert_same"], "decbert_same-none"),
        (["b_lm", "none", "--", "--lr=2e-4", "--seed", 7], "none--lr=2e-4--seed=7"),
        (["b_lm", "none", "--", "--seed", 7, "--lr", "2e-4"], "none--lr=2e-4--seed=7"),
        (
            ["b_lm", "none", "--", "--adam-betas", "(0.9, 0.99)", "--cross-self-attention"],
            "none--adam_betas=0.9-0.99--cross_self_attention",
        ),
        (["b_lm", "none", "--", "--log-interval", 1, "--max-update", 5, "--num-workers=0"], "none"),
    ],
)
def test_a_folder_is_named_by_all_that_makes_another_run(words, folder):
    name, encoding, *more = words
    found, _ = dry_run(name, encoding, "--device", "cpu", *more)
    expected = f"checkpoints/{name}/{sentences().name}/{folder}"
    assert found[found.index("--save-dir") + 1] == expected


def test_many_changes_make_a_short_name_of_their_own():
    folders = set()
    for lr in ("1e-4", "2e-4"):
        words, _ = dry_run("b_lm", "none", "--device", "cpu", "--", *TINY, "--lr", lr)
        folders.add(Path(words[words.index("--save-dir") + 1]).name)
    assert len(folders) == 2
    assert all(name.startswith("none--7-changes-") and len(name) < 30 for name in folders)


def test_a_folder_goes_on_with_its_own_run_only(tmp_path):
    """What a folder was begun with is kept in it, as its name may be the user's."""
    data, words = sentences(), ["train-recipe", "b_small", "learned", sentences(), "--dry-run"]
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "checkpoint_last.pt").touch()
    begun = RunIdentity("b_small", "learned", data.name, "bert", {})
    (folder / "stamp.json").write_text(json.dumps({"inputs": begun._asdict()}))
    same = ["--out", folder]
    call(*words, *same, cwd=tmp_path)
    more_steps = ["--", "--max-update", 7, "--log-interval", 1, "--num-workers", 0]
    call(*words, *same, *more_steps, cwd=tmp_path)
    for directions in ("lr", "lr,lr,lr"):
        other = ["--", "--attention-directions", directions]
        told = refusal(*words, *same, *other, cwd=tmp_path)
        assert f"(changes, --attention-directions: None, not {directions}); choose" in told
    words[2] = "none"
    told = refusal(*words, *same, cwd=tmp_path)
    assert "has a run with other settings (encoding: learned, not none)" in told
    (folder / "checkpoint_last.pt").unlink()  # what failed before it had one blocks nothing
    call(*words, *same, cwd=tmp_path)


def test_overrides_of_the_batch_are_said():
    _, said = dry_run("b_small", "learned", "--device", "cpu", "--", "--batch-size", 4)
    assert "options after -- change the batch" in said


def test_a_restore_file_cannot_replace_the_last_checkpoint():
    folder = new_directory()
    restore = ["--device", "cpu", "--out", folder, "--", "--restore-file", "x.pt"]
    _, said = dry_run("a_base", "m4m", *restore)
    assert "starting from the checkpoint in the options after --" in said
    (folder / "checkpoint_last.pt").touch()
    told = refusal("train-recipe", "a_base", "m4m", sentences(), *restore)
    assert "would be overwritten: leave --restore-file out" in told


def test_help_names_all_recipes_and_options():
    told, _ = call("train-recipe", "--help")
    assert all(f"\n  {name} " in told for name in recipes.list_trainings())
    for option in ("--gpus N", "--nodes N", "--per-gpu N", "--out DIR", "--bf16", "--dry-run"):
        assert option in told
    assert all(f"\n  {name} " in call("ablation", "--help")[0] for name in ABLATIONS)


# -------------------------------------------------------------------------------------- ablations


@pytest.mark.parametrize("name", ABLATIONS)
def test_an_ablation_trains_its_models_each_in_a_folder_of_its_own(name):
    """With its recipe's settings otherwise, and in the folder of that recipe's own runs."""
    ablation = ABLATIONS[name]
    lines = call("ablation", name, sentences(), "--dry-run", "--device", "cpu")[0].splitlines()
    found = [settings(shlex.split(line)) for line in lines]
    expected = of_recipe(ablation["recipe"])
    for args, run_ in zip(found, ablation["runs"], strict=True):
        position = resolve_positions(args)
        assert position.encoder == specs.parse(run_["position_encoding"])
        directions = run_.get("attention_directions", "both")
        assert ",".join(position.directions or ["both"]) == directions
        own = {**expected, "fp16": plain(False)}  # on the processor
        assert {key: plain(getattr(args, key)) for key in own} == own
    folders = {args.save_dir for args in found}
    assert len(folders) == len(found)
    assert {str(Path(folder).parents[1]) for folder in folders} == {
        f"checkpoints/{ablation['recipe']}"
    }


def test_what_an_ablation_is_given_reaches_every_model():
    more = ["--dry-run", "--bf16", "--", "--max-update", 40000]
    lines = call("ablation", "sinusoidal", sentences(), *more)[0].splitlines()
    assert len(lines) == 3
    for line in lines:
        args = settings(shlex.split(line))
        assert (args.bf16, args.max_update) == (True, 40000)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["depth", "x"], "argument NAME: invalid choice: 'depth' (choose from"),
        (["heads"], "the following arguments are required: DATA"),
        (["heads", "x", "--out", "y"], "unrecognized arguments: --out y"),
        (["heads", "x", "--device", "cpu", "--", "--save-dir", "y"], "x: no such folder"),
    ],
)
def test_wrong_ablations_are_told_in_one_line(arguments, message):
    assert message in refusal("ablation", *arguments)


# ------------------------------------------------------------------------------- several machines


def stand_in(name: str, program: str) -> str:
    """Return a PATH that begins with a program of a cluster, which is not to be had here."""
    folder = new_directory()
    (folder / name).write_text(f"#!/bin/sh\n{program}\n", encoding="utf-8")
    (folder / name).chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


def test_on_slurm_the_nodes_of_the_step_meet_at_the_first():
    step = {
        "SLURM_STEP_NUM_NODES": "4",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_NODELIST": "node[7-10]",
        "SLURM_JOB_ID": "123456",
        "PATH": stand_in(
            "scontrol", '[ "$*" = "show hostnames node[7-10]" ] && echo "node7\nnode8"'
        ),
    }
    words, said = dry_run("a_base", "m4m", "--gpus", 8, "--init", __file__, **step)
    assert settings(words).distributed_world_size == 32
    assert "480 sequences = 32 GPU(s) x 15 x 1 steps" in said
    assert words[1:6] == [
        "--nnodes=4",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=node7:23456",
        "--rdzv-id=123456",
        "--nproc_per_node=8",
    ]
    step["SLURM_STEP_NUM_TASKS"] = "32"
    told = refusal("train-recipe", "a_small", "m4m", sentences(), "--gpus", 8, **step)
    assert "start it once on each node: srun --ntasks-per-node=1" in told


@slow
def test_the_slurm_wrapper_starts_the_script_once_on_each_node():
    path = stand_in("srun", 'printf "%s|" "$@"')
    done = start("slurm", "a b.sh", "learned", SLURM_CPUS_PER_TASK="32", PATH=path)
    expected = "--ntasks-per-node=1|--kill-on-bad-exit=1|--cpus-per-task=32|a b.sh|learned|"
    assert done.stdout == expected


@slow
def test_two_machines_find_each_other(tmp_path):
    """The launcher of the script, on this machine twice, with a program that tells its rank."""
    head = f"127.0.0.1:{free_ports(1)[0]}"
    words, _ = dry_run("b_small", "learned", "--gpus", 1, "--nodes", 2, "--head", head)
    (program,) = [i for i, word in enumerate(words) if word.endswith("/fairseq-train")]
    tell = tmp_path / "tell.py"
    tell.write_text(
        "import os\n"
        "name = os.environ['RANK'] + '-of-' + os.environ['WORLD_SIZE']\n"
        f"open(os.path.join({str(tmp_path)!r}, name), 'w').close()\n",
        encoding="utf-8",
    )
    launcher, quiet = [*words[:program], str(tell)], environment(PYTHONWARNINGS="ignore")
    both = [subprocess.Popen(launcher, env=quiet) for _ in range(2)]
    assert [process.wait() for process in both] == [0, 0]
    assert sorted(path.name for path in tmp_path.glob("*-of-*")) == ["0-of-2", "1-of-2"]


# -------------------------------------------------------------------------------------- real runs

TINY = [
    *("--encoder-layers", 2, "--encoder-embed-dim", 128, "--encoder-ffn-embed-dim", 512),
    *("--encoder-attention-heads", 4, "--tokens-per-sample", 16, "--max-positions", 16),
    *("--num-workers", 0, "--log-interval", 1),
]


def updates(path: Path) -> int:
    return int(torch.load(path, map_location="cpu")["optimizer_history"][-1]["num_updates"])


@slow
def test_a_killed_training_goes_on_from_its_own_checkpoint_and_not_from_the_first(tmp_path):
    init = tmp_path / "init.pt"
    shutil.copy(trained("masked_lm").save_dir / "checkpoint_last.pt", init)
    folder = tmp_path / "run"
    last = folder / "checkpoint_last.pt"
    arguments = ["m4m", sentences(), "--device", "cpu", "--init", init, "--out", folder, "--"]
    arguments += TINY
    endless = ["--save-interval-updates", 1, "--max-update", 1_000_000]
    command = [SCRIPTS / "a_base.sh", *arguments, *endless]
    kill_in_training(command, last, tmp_path)
    log = (folder / "train.log").read_text(encoding="utf-8")
    assert f"loading pretrained model from {init}" in log
    assert f"Loaded checkpoint {init}" in log

    # Killed in the middle of a copy: the last checkpoint is torn, the best one is whole.
    shutil.copy(last, folder / "checkpoint_best.pt")
    for path in folder.glob("checkpoint_[0-9]*.pt"):
        path.unlink()
    with open(last, "r+b") as file:
        before = updates(last)
        file.truncate(last.stat().st_size // 2)
    init.unlink()  # is not needed any more
    done = start("a_base", *arguments, "--max-update", before + 2, cwd=tmp_path)
    assert "resumes from checkpoint_best.pt, the newest complete checkpoint" in done.stdout
    assert f"resuming from {last}" in done.stderr
    assert f"Loaded checkpoint {last}" in done.stdout
    assert f"@ {before} updates)" in done.stdout
    assert "loading pretrained model" not in done.stdout
    assert updates(last) == before + 2
    assert "num_updates" in (folder / "train.log").read_text(encoding="utf-8")[len(log) :]

    done = start("a_base", *arguments, "--max-update", before + 2, cwd=tmp_path)
    assert "the training is finished, and nothing was changed" in done.stdout
    assert updates(last) == before + 2


@slow
def test_a_yaml_file_trains(tmp_path):
    """Two updates of DecBERT; fairseq's own program finds the other file, too."""
    tiny = ["layers=2", "embed_dim=16", "ffn_embed_dim=16", "attention_heads=4"]
    done = run(
        "fairseq-hydra-train",
        *("--config-dir", CONFIGS, "--config-name", "b_small", f"task.data={sentences()}"),
        *("model.position_encoding=none", "model._name=decbert_diff", "common.fp16=false"),
        *(f"model.encoder_{size}" for size in tiny),
        *(f"common.user_dir={USER_DIR}", "common.cpu=true", "optimization.max_update=2"),
        *("distributed_training.distributed_world_size=1", "dataset.num_workers=0"),
        cwd=tmp_path,
    )
    assert "none | directions: lr x1 rl x1" in done.positions()[0]
    assert updates(tmp_path / "checkpoints/b_small/decbert_diff-none/checkpoint_last.pt") == 2


@slow
def test_the_same_command_goes_on_and_its_exit_code_is_the_trainings(tmp_path):
    """Trains for real: one update holds all of the text, so an update is an epoch."""
    tiny = ["--decoder-layers", 1, "--decoder-embed-dim", 32, "--decoder-ffn-embed-dim", 32]
    tiny += ["--decoder-attention-heads", 4, "--tokens-per-sample", 16, "--num-workers", 0]
    words = [
        "train-recipe",
        "b_lm",
        "alibi",
        sentences(),
        "--device",
        "cpu",
        "--out",
        "mine",
        "--",
        *tiny,
    ]
    first, second = (
        run("fairseq-posenc", *words, "--max-update", updates_, cwd=tmp_path) for updates_ in (1, 3)
    )
    assert "starting from new weights; checkpoints go to mine" in first.err
    assert "position encoding: alibi" in first.out
    assert "resuming from mine/checkpoint_last.pt" in second.err
    assert "Loaded checkpoint mine/checkpoint_last.pt (epoch 2 @ 1 updates)" in second.out
    assert updates(tmp_path / "mine/checkpoint_last.pt") == 3
    log = (tmp_path / "mine/train.log").read_text(encoding="utf-8")
    assert log == first.out + second.out
    wrong = run("fairseq-posenc", *words, "--max-update", "far", cwd=tmp_path, fails=True)
    assert wrong.status == 2
    assert "invalid" in wrong.out
