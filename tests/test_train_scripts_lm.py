"""The training script of the causal language model, against the paper's settings."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest
from fairseq import options

from commands import new_directory, sentences
from fairseq_posenc.transformer.options import resolve

pytestmark = pytest.mark.slow
REPOSITORY = Path(__file__).resolve().parent.parent
SCRIPT = REPOSITORY / "train_scripts" / "b_lm.sh"
# Luo et al. (2022), arXiv:2204.08688: the causal language models of table 1.
RECIPE = {
    "task": "language_modeling",
    "decoder_layers": 8,
    "decoder_embed_dim": 768,
    "decoder_ffn_embed_dim": 3072,
    "decoder_attention_heads": 12,
    "activation_fn": "gelu",
    "share_decoder_input_output_embed": True,  # or it would not have 95 M parameters
    "tokens_per_sample": 512,
    "max_update": 100_000,
    "optimizer": "adam",
    "adam_betas": "(0.9, 0.998)",
    "adam_eps": 1e-6,
    "lr": [5e-5],
    "weight_decay": 0.001,
    "clip_norm": 0.1,
    "dropout": 0.1,
    "seed": 1,
    "lr_scheduler": "polynomial_decay",
    "total_num_update": "100000",
    "warmup_updates": 10_000,
}
TINY = [
    *("--decoder-layers", 1, "--decoder-embed-dim", 32, "--decoder-ffn-embed-dim", 32),
    *("--decoder-attention-heads", 4, "--tokens-per-sample", 16),
]


def start(*arguments, cwd: Path | None = None, status: int = 0) -> subprocess.CompletedProcess:
    command = [SCRIPT, *map(str, arguments)]
    done = subprocess.run(
        command, cwd=cwd or new_directory(), capture_output=True, text=True, check=False
    )
    assert done.returncode == status, done.stdout[-2000:] + done.stderr[-2000:]
    return done


def dry_run(*arguments, **how) -> tuple[list[str], str]:
    """Return the words of the command that the script would start, and what it said."""
    encoding, *rest = arguments
    done = start(encoding, sentences(), "--dry-run", *rest, **how)
    return shlex.split(done.stdout), done.stderr


def settings(words: list[str]):
    """Return the settings that fairseq-train understands the command as."""
    (program,) = [i for i, word in enumerate(words) if word.endswith("/fairseq-train")]
    parser = options.get_training_parser()
    return options.parse_args_and_arch(parser, input_args=words[program + 1 :])


@pytest.mark.parametrize("encoding", ["learned", "none", "rope(scaling=ntk:4)"])
def test_the_settings_are_the_papers(encoding):
    words, _ = dry_run(encoding, "--gpus", 2)
    args = settings(words)
    assert {name: getattr(args, name) for name in RECIPE} == RECIPE
    assert str(resolve(args).decoder) == encoding
    assert args.data == str(sentences())
    assert args.fp16


@pytest.mark.parametrize(("gpus", "each"), [(1, 16), (2, 16), (4, 32), (8, 4), (8, 16)])
def test_the_batch_is_128_sequences_whatever_the_gpus(gpus, each):
    words, said = dry_run("learned", "--gpus", gpus, "--per-gpu", each)
    args = settings(words)
    (update_freq,) = args.update_freq
    assert (args.batch_size, args.distributed_world_size) == (each, gpus)
    assert gpus * each * update_freq == 128
    told = f"128 sequences = {gpus} GPU(s) x {each} x {update_freq} steps (--update-freq)"
    assert told in said
    launcher = [Path(word).name for word in words[: words.index(str(sentences()))]]
    alone = ["fairseq-train"]
    several = ["torchrun", "--standalone", f"--nproc_per_node={gpus}", "fairseq-train"]
    assert launcher == (alone if gpus == 1 else several)


def test_the_users_options_come_last():
    words, _ = dry_run("learned", "--cpu", "--save-dir", "a b", "--", "--lr", "1e-3", "--seed", 7)
    args = settings(words)
    assert args.cpu
    assert not args.fp16
    assert (args.lr, args.seed, args.save_dir) == ([1e-3], 7, "a b")
    assert settings(dry_run("learned", "--gpus", 1, "--bf16")[0]).bf16


def test_models_of_other_data_and_encodings_have_other_folders():
    folders = []
    for encoding in ("learned", "none", "m4(max_distance=8, reset=true)"):
        words, _ = dry_run(encoding, "--cpu")
        folders.append(words[words.index("--save-dir") + 1])
    names = ["learned", "none", "m4-max_distance=8-reset=true"]
    assert folders == [f"checkpoints/b_lm/{sentences().name}/{name}" for name in names]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "expected ENCODING DATA; "),
        (["--cpu", "learned"], "expected ENCODING DATA before the options; "),
        (["learned", "nowhere"], "there is no folder nowhere"),
        (["learned", "DATA", "--gpus"], "--gpus needs a value"),
        (["learned", "DATA", "--gpus", "0"], "--gpus must be a whole number of at least 1"),
        (["learned", "DATA", "--per-gpu", "x"], "--per-gpu must be a whole number"),
        (["learned", "DATA", "--lr", "1"], "unknown option '--lr' (options for fairseq-train go"),
        (["learned", "DATA", "--cpu", "--gpus", "2"], "--cpu goes without --gpus and --bf16"),
        (["learned", "DATA", "--cpu", "--bf16"], "--cpu goes without --gpus and --bf16"),
        (["learned", "DATA", "--gpus", "3"], "a batch of 128 sequences cannot be made of steps"),
    ],
)
def test_wrong_arguments_are_told_in_one_line(arguments, message):
    words = [str(sentences()) if word == "DATA" else word for word in arguments]
    done = start(*words, status=2)
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"b_lm: error: {message}")


def test_help_is_the_head_of_the_script():
    told = start("--help").stdout
    assert "train_scripts/b_lm.sh ENCODING DATA" in told
    assert "--per-gpu N" in told
    assert "set -" not in told


def test_the_same_command_goes_on_from_the_last_checkpoint(tmp_path):
    """Trains for real: one update holds all of the text, so an update is an epoch."""
    told = []
    for updates in (1, 3):
        options = ["--cpu", "--", *TINY, "--num-workers", 0, "--max-update", updates]
        done = start("alibi", sentences(), *options, cwd=tmp_path)
        told.append(done.stdout + done.stderr)
    folder = f"checkpoints/b_lm/{sentences().name}/alibi"
    assert f"starting from new weights; checkpoints go to {folder}" in told[0]
    assert "position encoding: alibi" in told[0]
    assert f"going on from {folder}/checkpoint_last.pt" in told[1]
    assert f"Loaded checkpoint {folder}/checkpoint_last.pt (epoch 2 @ 1 updates)" in told[1]
    assert "num_updates=3" in told[1] or "num_updates 3" in told[1]
    assert (tmp_path / folder / "checkpoint_best.pt").is_file()
