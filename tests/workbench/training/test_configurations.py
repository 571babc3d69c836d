"""The configurations of train_scripts/: the papers' settings, and trainings as users start them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from fairseq_posenc.errors import UserError
from fairseq_posenc.transformer.options import refuse_unknown_settings
from fairseq_posenc.workbench.finetuning.recipes import compose_file
from fairseq_posenc.workbench.loading.checkpoints import updates_done
from fairseq_posenc.workbench.training import LoadPlugin, count_steps, name_data, share_batch
from tests.helpers import commands
from tests.helpers.products import WHOLE
from tests.helpers.programs import SERVER

SCRIPTS = Path(__file__).resolve().parents[3] / "train_scripts"
CONFIGS = SCRIPTS / "configs"

BASE = {"encoder_layers": 12, "encoder_embed_dim": 768, "encoder_ffn_embed_dim": 3072}
LARGE = {"encoder_layers": 24, "encoder_embed_dim": 1024, "encoder_ffn_embed_dim": 4096}
M4M = {"max_update": 500_000, "lr": [1e-4], "adam_betas": "(0.9, 0.98)", "weight_decay": 0.01}
M4M |= {"warmup_updates": 24_000, "total_num_update": 500_000, "tokens_per_sample": 512}
DECBERT = {"adam_betas": "(0.9, 0.98)", "adam_eps": 1e-6, "dropout": 0.1, "weight_decay": 0.01}
B_SMALL = {"lr": [1e-4], "clip_norm": 0.5, "seed": 1, "warmup_updates": 10_000}
B_SMALL |= {"max_update": 200_000, "total_num_update": 200_000}
B_LARGE = {"lr": [3e-4], "clip_norm": 2.0, "seed": 1, "max_update": 300_000}
B_LARGE |= {"warmup_steps": 24_000, "decay_steps": 476_000}  # as long as table 7's 500k updates
B_LM = {"lr": [5e-5], "clip_norm": 0.1, "seed": 1, "max_update": 100_000, "warmup_updates": 10_000}
B_LM |= {"decoder_layers": 8, "decoder_embed_dim": 768, "decoder_ffn_embed_dim": 3072}
B_LM |= {"decoder_attention_heads": 12, "activation_fn": "gelu", "dropout": 0.1}
B_LM |= {"adam_betas": "(0.9, 0.998)", "adam_eps": 1e-6, "weight_decay": 0.001}
# Of 20 epochs, the rate rises over 6 and falls exponentially over 14.
TRANSLATION = {"lr": [3e-4], "max_epoch": 20, "phase_ratio": [0.3, 0.0, 0.7], "dropout": 0.1}
TRANSLATION |= {"encoder_layers": 6, "encoder_embed_dim": 512, "encoder_attention_heads": 8}
TRANSLATION |= {"decoder_layers": 6, "decoder_ffn_embed_dim": 2048}
# Settings of the papers and what completes them; `batch`: sequences or tokens of an update.
SETTINGS: dict[str, dict[str, Any]] = {
    **{name: {**BASE, **M4M, "batch": 96} for name in ("a_small", "a_none")},
    **{name: {**BASE, **M4M, "batch": 480} for name in ("a_base", "a_c4")},
    "a_large": {**LARGE, **M4M, "warmup_updates": 30_000, "batch": 192},
    "b_small": {**BASE, **DECBERT, **B_SMALL, "batch": 256},
    "b_large": {**BASE, **DECBERT, **B_LARGE, "batch": 4096},
    "b_lm": {**B_LM, "share_decoder_input_output_embed": True, "batch": 128},
    "translation_iwslt17": {**TRANSLATION, "batch": 8192},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_configuration_states_the_papers_settings_for_any_number_of_gpus(name):
    expected = {**SETTINGS[name], "position_encoding": "???"}  # which the user chooses
    batch = expected.pop("batch")
    for gpus in (1, 2) if name == "translation_iwslt17" else (1, 2, 8, 32):
        count = f"distributed_training.distributed_world_size={gpus}"
        config = compose_file(CONFIGS / f"{name}.yaml", [count])
        config.checkpoint.save_dir = "here"  # hydra knows its folder only while it runs
        sections = filter(None, OmegaConf.to_container(config, resolve=True).values())
        flat = {key: value for section in sections for key, value in section.items()}
        size = flat["batch_size"] or flat["max_tokens"]
        assert gpus * size * flat["update_freq"][0] == batch
    assert {key: flat[key] for key in expected} == expected
    refuse_unknown_settings(config.model)
    start = {"a_base": "roberta.base/model.pt", "a_large": "roberta.large/model.pt"}.get(name)
    assert flat["finetune_from_model"] == start
    assert flat["log_interval"] <= 100  # often enough for the stages of the loss


def test_there_is_a_script_for_each_training_and_a_sweep_for_each_ablation():
    others = {"plugin", "masked_lm", "laptop", "laptop_lm", "laptop_translation"}
    ablations = {f"ablation_{name}" for name in ("scale_factor", "heads", "layers", "sinusoidal")}
    assert {path.stem for path in CONFIGS.glob("*.yaml")} == {*SETTINGS, *ablations, *others}
    scripts = {path.stem: path.read_text() for path in SCRIPTS.glob("*.sh")}
    assert scripts.keys() == {*SETTINGS, "ablation", "slurm", "train"}
    for name in SETTINGS:
        assert f'/train.sh" {name} "$@"' in scripts[name]
        assert os.access(SCRIPTS / f"{name}.sh", os.X_OK)


def test_a_batch_that_cannot_be_shared_out_is_refused():
    for size, gpus in ((16, 3), (512, 1)):
        with pytest.raises(UserError, match="an update of 256 cannot be made of batches"):
            count_steps(256, size, gpus)
    with pytest.raises(UserError, match="256 sequences cannot be divided among 3 GPUs"):
        share_batch(256, 16, 3)


def test_shards_are_named_by_their_folder():
    assert name_data("data-bin/c4/shard0-of-2:data-bin/c4/shard1-of-2") == "c4"


DATA = {"laptop": "docs", "laptop_lm": "docs", "laptop_translation": "multi30k"}
QUICK = ["optimization.max_update=2", "common.log_interval=1"]


def run(folder, *words, program="train.sh", imported=False, fails=False, **more):
    """Run a script, if ``imported`` in a process that has loaded the plugin: faster."""
    if imported and not WHOLE and SERVER in os.environ:
        more[SERVER] = f"{os.environ[SERVER]}.plugin"
    path = f"{commands.script('python').parent}{os.pathsep}{os.environ['PATH']}"
    more = {"warnings": "", "PATH": path, **more}
    done = commands.run(SCRIPTS / program, *words, cwd=folder, fails=fails, **more)
    assert bool(done.status) == fails
    return done.log


@pytest.fixture(name="place")
def _place(tmp_path):
    (tmp_path / "data-bin").mkdir()
    (tmp_path / "data-bin" / "docs").symlink_to(commands.sentences())
    (tmp_path / "data-bin" / "multi30k").symlink_to(commands.pairs())
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("name", DATA)
def test_a_configuration_for_a_laptop_runs_unchanged(name, place):
    words = ["task.source_lang=src", "task.target_lang=tgt"] if "translation" in name else []
    (place / "fairseq_posenc").mkdir()  # as in a checkout; but the installed package runs
    (place / "fairseq_posenc" / "__init__.py").write_text("raise ImportError('not installed')")
    said = run(place, name, *QUICK, *words, imported=name != "laptop")
    assert "UserWarning" not in said
    assert max(map(len, said.splitlines())) < 800  # a terminal is not flooded with settings
    (last,) = place.glob(f"checkpoints/{name}/{DATA[name]}/rope/**/checkpoint_last.pt")
    assert updates_done(last.parent) == 2
    assert "done training" in (last.parent / "train.log").read_text()
    assert {path.name for path in place.iterdir()} == {"data-bin", "checkpoints", "fairseq_posenc"}


@pytest.mark.slow
def test_a_sweep_trains_a_model_for_each_value(place):
    run(
        place,
        *("ablation_layers", "task.data=data-bin/docs", "optimization.max_update=1"),
        *("common.cpu=true", "common.fp16=false", "model.encoder_layers=3"),
        *("model.encoder_embed_dim=24", "model.encoder_ffn_embed_dim=24"),
        *("dataset.batch_size=4", "task.tokens_per_sample=16", "checkpoint.no_save=true"),
        "hydra.sweep.subdir=${hydra.job.num}",
        imported=True,
    )
    logs = [path.read_text() for path in sorted(place.glob("checkpoints/*/*/train.log"))]
    directions = ["both x3", "lr x1 both x2", "lr x2 both x1", "lr x3", "lr x1 rl x1 both x1"]
    directions.append("lr x1 rl x1 lr x1")
    for log, expected in zip(logs, directions, strict=True):
        assert f"learned | directions: {expected} |" in log
        assert "best_loss" not in log  # of an earlier member: each has a single validation


def test_a_model_of_the_users_own_is_accepted():
    config = {"common": {"user_dir": "my_models"}, "model": {"_name": "mine", "size": 3}}
    LoadPlugin().on_job_start(OmegaConf.create(config))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "setting", "message"),
    [
        ("b_small", "distributed_training.distributed_world_size=3", "divided among 3 GPUs"),
        ("laptop", "distributed_training.distributed_world_size=2", "fewer GPUs than --distrib"),
        ("laptop", "model.position_encodin=rope", "mean position_encoding or position_en"),
        ("laptop", "max_update=3", "did you mean optimization.max_update? Key"),
        ("laptop", "model.init_positions=true", "init_positions: Key 'init_positions' is not in"),
        ("laptop", "optimization.max_update=x", "the setting optimization.max_update: Value 'x'"),
        ("laptop", "optimization.lr=0.1", "optimization.lr is a list: write brackets"),
        ("laptop", "model.activation_fn=m4(b=2)", "\"model.activation_fn='m4(b=2)'\""),
        ("laptop", "model.activation_fn=m4,rope", "\"model.activation_fn='m4,rope'\""),
        ("laptop", "+model.position_encodin=rope", "_decoder? roberta_none has no such setting"),
        ("laptop", "model._name=roberta_rop", "_name=roberta_rop: did you mean roberta_rope or"),
        ("laptop", "optimizer._name=adamm", "fairseq has no 'adamm': did you mean adam"),
        ("../configs/laptop", "a.b=1", "no configuration ../configs/laptop: give one of"),
        ("laptopp", "common.seed=1", "no configuration laptopp: did you mean laptop or laptop_lm"),
    ],
)
def test_a_mistake_is_one_line(name, setting, message, place):
    words = (name, setting, "model.position_encoding=rope", "task.data=data-bin/docs")
    said = run(place, *words, imported=name == "laptop", fails=True)
    last = said.splitlines()[-1]
    assert last.startswith(("fairseq-posenc: error: ", "train.sh: error: "))
    assert message in last
    assert "Traceback" not in said


def test_a_program_without_a_python_is_one_line(tmp_path):
    (tmp_path / "fairseq-hydra-train").symlink_to(SCRIPTS / "train.sh")
    said = run(tmp_path, "laptop", PATH=f"{tmp_path}:/usr/bin:/bin", fails=True)
    assert said.startswith(f"train.sh: error: there is no python beside {tmp_path}/fairseq-hydra-t")
    (tmp_path / "python").symlink_to("/bin/echo")  # beside the link, not the program
    assert "--config-name laptop" in run(tmp_path, "laptop", PATH=f"{tmp_path}:/usr/bin:/bin")


@pytest.mark.slow
def test_slurm_starts_the_script_once_on_each_node(tmp_path):
    (tmp_path / "srun").write_text('#!/bin/sh\nprintf "%s|" "$@"\n')
    (tmp_path / "srun").chmod(0o755)
    variables = {"SLURM_JOB_ID": "123456", "SLURM_JOB_NUM_NODES": "4", "SLURM_GPUS_ON_NODE": "8"}
    variables |= {"SLURM_CPUS_PER_TASK": "32", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    assert run(tmp_path, "a.sh", "x=y", program="slurm.sh", **variables) == (
        "--ntasks-per-node=1|--kill-on-bad-exit=1|--cpus-per-task=32|a.sh|x=y|"
        "distributed_training.distributed_port=23456|distributed_training.distributed_world_size=32|"
    )
