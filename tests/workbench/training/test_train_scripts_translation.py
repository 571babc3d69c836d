"""The recipe and the YAML file for IWSLT 2017, against the report's settings."""

from __future__ import annotations

import math
import shlex
import subprocess
import time
from argparse import Namespace
from functools import cache
from pathlib import Path

import pytest
import torch
from fairseq.optim.lr_scheduler.tri_stage_lr_scheduler import (
    TriStageLRSchedule,
    TriStageLRScheduleConfig,
)
from fairseq.optim.sgd import SGD
from omegaconf import OmegaConf

from fairseq_posenc.transformer.options import resolve_positions
from fairseq_posenc.workbench.running.exit_codes import STOPPED
from tests.helpers.commands import USER_DIR, kill_in_training, pairs, run, script, train
from tests.helpers.waiting import wait_until
from tests.workbench.training.test_train_scripts_pretraining import call, refusal, settings

slow = pytest.mark.slow
REPOSITORY = Path(__file__).resolve().parents[3]
YAML = REPOSITORY / "finetune_configs" / "translation_iwslt17.yaml"
# The report: 6 + 6 layers of width 512, Adam, 20 epochs, three runs.
RECIPE = {
    "encoder_layers": 6,
    "encoder_embed_dim": 512,
    "encoder_ffn_embed_dim": 2048,
    "encoder_attention_heads": 8,
    "decoder_layers": 6,
    "decoder_embed_dim": 512,
    "decoder_ffn_embed_dim": 2048,
    "decoder_attention_heads": 8,
    "dropout": 0.1,
    "task": "translation",
    "criterion": "label_smoothed_cross_entropy",
    "label_smoothing": 0.0,  # plain cross-entropy
    "report_accuracy": True,
    "optimizer": "adam",
    "lr": [3e-4],
    "lr_scheduler": "tri_stage",
    "max_epoch": 20,
    "required_batch_size_multiple": 1,  # else fairseq drops sentences, of the validation too
}
# Of our choice: the report gives neither the batch nor the end of the decay.
CHOSEN = {"max_tokens": 4096, "init_lr_scale": 0.01, "final_lr_scale": 0.01}
TINY = [
    *("--encoder-layers", 1, "--encoder-embed-dim", 16, "--encoder-ffn-embed-dim", 16),
    *("--decoder-layers", 1, "--decoder-embed-dim", 16, "--decoder-ffn-embed-dim", 16),
    # Some batches an epoch, though there are only 16 sentences.
    *("--max-tokens", 48, "--required-batch-size-multiple", 1, "--num-workers", 0),
]


NAME = "translation_iwslt17"


@cache
def dry_run(encoding: str, *more: object) -> tuple[list[Namespace], str]:
    """Parse commands as fairseq-train does, and collect what was said beside them."""
    out, err = call("train-recipe", NAME, encoding, pairs(), "--dry-run", *more)
    return [settings(shlex.split(line)) for line in out.splitlines()], err


def updates_told(said: str) -> int:
    """Return the updates of an epoch from the script's line on them."""
    (line,) = [line for line in said.splitlines() if "an epoch has" in line]
    return int(line.split("an epoch has ")[1].split()[0])


# --------------------------------------------------------------------------------------- settings


def test_the_settings_are_the_reports():
    settings, _ = dry_run("learned+m4m(max_distance=64)", "--gpus", 2)
    assert [args.seed for args in settings] == [1, 2, 3]
    assert len({args.save_dir for args in settings}) == 3
    for args in settings:
        assert {name: getattr(args, name) for name in {**RECIPE, **CHOSEN}} == {**RECIPE, **CHOSEN}
        position = resolve_positions(args)
        assert str(position.encoder) == str(position.decoder) == "learned+m4m(max_distance=64)"
        assert (args.fp16, args.cpu, args.data) == (True, False, str(pairs()))


def test_the_rate_rises_over_6_epochs_and_falls_by_a_constant_factor_until_the_20th():
    settings, said = dry_run("learned+m4m(max_distance=64)", "--gpus", 2)
    updates = updates_told(said)
    args = settings[0]
    names = ["warmup_steps", "hold_steps", "decay_steps", "init_lr_scale", "final_lr_scale", "lr"]
    config = TriStageLRScheduleConfig(**{name: getattr(args, name) for name in names})
    rates = rates_of(config, [epoch * updates for epoch in range(22)])
    assert rates[6] == max(rates) == pytest.approx(3e-4)
    rises = [after - before for before, after in zip(rates[:6], rates[1:7])]
    assert rises == pytest.approx([(3e-4 - 3e-6) / 6] * 6)
    falls = [after / before for before, after in zip(rates[6:20], rates[7:21])]
    assert falls == pytest.approx([0.01 ** (1 / 14)] * 14)
    assert rates[20:] == pytest.approx([3e-6] * 2)


def rates_of(config: TriStageLRScheduleConfig, updates: list[int]) -> list[float]:
    """Return fairseq's learning rates after given numbers of updates."""
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = SGD(Namespace(lr=config.lr, momentum=0.0, weight_decay=0.0), [weight])
    schedule = TriStageLRSchedule(config, optimizer)
    return [schedule.step_update(number) for number in updates]


def test_the_batch_is_shared_out_and_smaller_steps_make_more_updates():
    settings, said = dry_run("learned+m4m(max_distance=64)", "--gpus", 2)
    assert "global batch: 8192 tokens = 2 GPU(s) x 4096 x 1 steps (--update-freq)" in said
    assert [(args.distributed_world_size, args.update_freq) for args in settings] == [(2, [1])] * 3
    assert updates_told(said) == 1  # all sentences fit into one batch
    settings, said = dry_run("rope", "--device", "cpu", "--", *TINY)
    assert "= 1 processor(s) x 4096 x 2 steps" in said
    assert [(args.fp16, args.cpu, args.max_tokens) for args in settings] == [(False, True, 48)] * 3
    assert updates_told(said) > 1


def test_nodes_share_the_batches_of_an_epoch_as_gpus_do():
    """Four machines of a GPU make as many updates as one of four, and a quarter of one GPU's."""
    each = ["--per-gpu", 2048, "--head", "node0:29500", "--seeds", 1]
    tiny = ["--", *TINY, "--update-freq", 1]
    updates = {}
    for gpus, nodes in ((1, 1), (4, 1), (1, 4)):
        (args,), said = dry_run("rope", *each, "--gpus", gpus, "--nodes", nodes, *tiny)
        updates[gpus, nodes] = updates_told(said)
        assert args.distributed_world_size == gpus * nodes
        assert args.warmup_steps == 6 * updates_told(said)
        assert args.decay_steps == 14 * updates_told(said)
    assert updates[1, 4] == updates[4, 1] == math.ceil(updates[1, 1] / 4)
    assert updates[1, 4] < updates[1, 1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpus", 3], "a batch of 8192 tokens cannot be made of steps"),
        (
            ["--device", "cpu", "--seeds", "one"],
            "argument --seeds: must be whole numbers, as in 1,2,3, not 'one'",
        ),
        (
            ["--device", "cpu", "--", "--seed", 4],
            "--seed: name the seeds with --seeds 1,2, before the two dashes",
        ),
        (
            ["--device", "cpu", "--", "--save-dir=x"],
            "--save-dir: name the folder with --out, before the two dashes",
        ),
        (
            ["--device", "cpu", "--", "--update-freq", "1,2"],
            "--update-freq: give a single number, so that",
        ),
    ],
)
def test_wrong_arguments_are_told_in_one_line(arguments, message):
    told = refusal("train-recipe", NAME, "rope", pairs(), *arguments)
    assert told.partition("error: ")[2].startswith(message)


# -------------------------------------------------------------------------------------- real runs


def checkpoint(path: Path) -> tuple[int, int, float]:
    """Return its epoch, its updates, and the best validation loss so far."""
    state = torch.load(path, map_location="cpu")
    updates = state["optimizer_history"][-1]["num_updates"]
    extra = state["extra_state"]
    return extra["train_iterator"]["epoch"], updates, extra["best"]


@slow
def test_a_killed_training_goes_on_and_the_best_seed_is_named(tmp_path):
    options = [*TINY, "--clip-norm", 1.0, "--log-interval", 1]
    endless = ["--save-interval-updates", 1, "--keep-interval-updates", 1, "--max-epoch", 100_000]
    last = tmp_path / "runs" / "seed1" / "checkpoint_last.pt"
    words = ["train-recipe", NAME, "rope", pairs(), "--device", "cpu", "--out", "runs", "--seeds"]
    command = [script("fairseq-posenc"), *words, "1,2", "--", *options, *endless]
    kill_in_training(command, last, tmp_path)
    epoch, before, _ = checkpoint(last)

    options += ["--max-epoch", epoch + 1]
    done = run("fairseq-posenc", *words, "1,2", "--", *options, cwd=tmp_path)
    assert (
        f"Loaded checkpoint runs/seed1/checkpoint_last.pt (epoch {epoch} @ {before} upd" in done.out
    )
    losses = {}
    for seed in (1, 2):
        path = f"runs/seed{seed}/checkpoint_best.pt"
        _, updates, losses[path] = checkpoint(tmp_path / f"runs/seed{seed}/checkpoint_last.pt")
        # The updates of an epoch were counted as fairseq has made them.
        assert updates == (epoch + 1) * updates_told(done.err)
    first, second = sorted(losses, key=losses.get)
    nats = [losses[path] * math.log(2) for path in (first, second)]  # as the report has them
    assert done.out.splitlines()[-2:] == [
        f"best  validation loss {losses[first]:.4f} bits, {nats[0]:.4f} nats  {first}",
        f"      validation loss {losses[second]:.4f} bits, {nats[1]:.4f} nats  {second}",
    ]


@slow
def test_a_run_of_several_ends_with_its_command(tmp_path):
    words = ["train-recipe", NAME, "rope", pairs(), "--device", "cpu"]
    words += ["--out", "runs", "--seeds", "1,2"]
    command = [script("fairseq-posenc"), *words, "--", *TINY, "--max-epoch", 100_000]
    quiet = subprocess.DEVNULL
    process = subprocess.Popen([*map(str, command)], cwd=tmp_path, stdout=quiet, stderr=quiet)
    log = tmp_path / "runs" / "seed1" / "train.log"
    wait_until(lambda: log.exists() and "| valid |" in log.read_text("utf-8"), process)
    process.terminate()  # the command alone, as a cluster may
    assert process.wait() == STOPPED
    size = log.stat().st_size
    time.sleep(1)  # some epochs, if the training were still running
    assert log.stat().st_size == size
    assert not (tmp_path / "runs" / "seed2").exists()


@slow
def test_the_criterion_is_plain_cross_entropy_with_the_accuracy_of_the_validation():
    """The loss, the gradient and so the training are those of fairseq's ``cross_entropy``."""
    plain = ["--criterion", "cross_entropy"]
    ours = [
        *("--criterion", RECIPE["criterion"], "--label-smoothing", RECIPE["label_smoothing"]),
        "--report-accuracy",
    ]
    runs = [train("translation", "--max-epoch", 2, *criterion) for criterion in (plain, ours)]
    for group in ("train", "valid"):
        for key in ("loss", "gnorm") if group == "train" else ("loss",):
            theirs, found = (run.figures(group, key) for run in runs)
            assert found == pytest.approx(theirs, rel=1e-5)
    assert [("valid_accuracy" in each.run.log) for each in runs] == [False, True]


# ------------------------------------------------------------------------------------------- YAML


def test_the_yaml_file_has_the_settings_of_the_script():
    config = OmegaConf.to_container(OmegaConf.load(YAML), resolve=False)
    sections = ["model", "dataset", "lr_scheduler", "optimization"]
    found = {name: value for section in sections for name, value in config[section].items()}
    found.update(config["criterion"])
    for section in ("task", "optimizer", "lr_scheduler", "criterion"):
        found[section] = config[section]["_name"]
    expected = {**RECIPE, **CHOSEN, "phase_ratio": [0.3, 0.0, 0.7], "update_freq": [2]}
    assert {name: found.get(name) for name in expected} == expected
    assert [share * RECIPE["max_epoch"] for share in found["phase_ratio"]] == [6, 0, 14]


@slow
def test_the_yaml_file_trains(tmp_path):
    sizes = {"layers": 1, "embed_dim": 16, "ffn_embed_dim": 16, "attention_heads": 4}
    tiny = [f"model.{side}_{k}={v}" for side in ("encoder", "decoder") for k, v in sizes.items()]
    done = run(
        "fairseq-hydra-train",
        *("--config-dir", YAML.parent, "--config-name", YAML.stem, *tiny),
        *(f"task.data={pairs()}", "model.position_encoding=alibi", "optimization.max_update=2"),
        *(f"common.user_dir={USER_DIR}", "common.fp16=false", "common.cpu=true"),
        *("dataset.num_workers=0", "dataset.required_batch_size_multiple=1"),
        cwd=tmp_path,
    )
    assert [line.split(" |")[0] for line in done.positions()] == ["alibi"] * 2
    path = tmp_path / "checkpoints/translation_iwslt17/alibi/seed1/checkpoint_last.pt"
    assert checkpoint(path)[1] == 2
