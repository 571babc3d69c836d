"""The commands that are disturbed: small, and each with all that it does in earnest."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tests.helpers.commands import FAMILIES, TRAINING, USER_DIR, new_directory, sentences
from tests.preprocess import test_preprocess_shards as preprocess
from tests.workbench.experiments.test_compare import small_text
from tests.workbench.finetuning import test_glue_commands as glue
from tests.workbench.finetuning import test_squad_commands as squad
from tests.workbench.translation import test_translation_commands as translation

# Four updates make an epoch; checkpoints fall into it. fairseq's defaults for all that is random.
FOUR = ["--batch-size", 4, "--dropout", 0.1, "--attention-dropout", 0.1, "--max-epoch", 3]
UPDATES = [*FOUR, "--max-update", 10, "--save-interval-updates", 3, "--keep-interval-updates", 2]
REDRAWN = ["--update-epoch-batch-itr", True]

HYDRA = """# @package _global_
common: {{user_dir: {user_dir}, cpu: true}}
task: {{_name: language_modeling, data: {data}, sample_break_mode: complete, tokens_per_sample: 16}}
model: {{_name: transformer_lm_rope_tiny}}
criterion: cross_entropy
optimizer: {{_name: adam}}
lr_scheduler: {{_name: fixed}}
optimization: {{lr: [0.001], max_update: 10}}
dataset: {{batch_size: 4, required_batch_size_multiple: 1, num_workers: 0,
  update_epoch_batch_itr: true}}
checkpoint: {{save_dir: {out}, save_interval_updates: 3}}
hydra: {{run: {{dir: .}}, output_subdir: null}}
"""


def training(family: str, *options: Any) -> Callable[[Path], list[Any]]:
    """Build the function that makes the command of a training in a family."""

    def words(out: Path) -> list[Any]:
        chosen = FAMILIES[family]
        model = ["--user-dir", USER_DIR, *chosen.task, *chosen.model, *TRAINING]
        more = [*options, *REDRAWN]
        return ["fairseq-train", chosen.data(), *model, *more, "--save-dir", out / "run"]

    return words


def hydra(out: Path) -> list[Any]:
    """Return a training by a configuration, whose file lies beside what is made."""
    folder = out.parent
    text = HYDRA.format(user_dir=USER_DIR, data=sentences(), out=out / "run")
    (folder / "training.yaml").write_text(text, encoding="utf-8")
    return ["fairseq-hydra-train", "--config-dir", folder, "--config-name", "training"]


@cache
def text() -> Path:
    """Return a text of some hundred thousand words."""
    path = new_directory() / "text"
    path.write_text(preprocess.make_text(path.with_name("few"), 4000).read_text() * 8)
    return path


def binarize(out: Path) -> list[Any]:
    """Return preprocessing that saves its place after each piece of 20,000 bytes."""
    words = ["--train", str(text()), "--words", "--workers", "2", "--out", str(out / "bin")]
    return ["python", "-c", preprocess.saving("plain_text", words)]


def compare(out: Path) -> list[Any]:
    """Return a comparison of two models, with validations and checkpoints."""
    lines = small_text(out.parent / "text.txt")
    models = ["--encodings", "none,decbert_diff", "--updates", 12, "--vocab-size", 60]
    tiny = ["--encoder-embed-dim", 16, "--encoder-ffn-embed-dim", 16, "--max-tokens", 1024]
    given = ["--text", lines, "--out", out / "run", *models, "--seeds", 1, "--jobs", 1]
    return ["fairseq-posenc", "compare", *given, "--", *tiny]


def bleu(out: Path) -> list[Any]:
    """Return an evaluation in two parts."""
    options = ["--beam", 1, "--num-shards", 2, "--device", "cpu", "--out", out / "run"]
    return ["fairseq-posenc", "bleu", f"rope={translation.checkpoint()}", *options]


def fine_tuning(out: Path) -> list[Any]:
    """Return a task of GLUE: three updates an epoch, two epochs."""
    short = [*glue.QUICK, *glue.changed("optimization.max_epoch=2")]
    words = glue.arguments("m4m", *glue.RATE, "--jobs", 1, "--out", out / "run", *short)
    return ["fairseq-posenc", *words]


def reading(out: Path) -> list[Any]:
    """Return a fine-tuning on SQuAD with a checkpoint an epoch."""
    epochs = {"optimization.max_epoch": 3, "checkpoint.save_interval": 1}
    return ["fairseq-posenc", *squad.train_words(out / "run", **epochs)]


JOBS: dict[str, Callable[[Path], Sequence[Any]]] = {
    **{f"{family}, updates": training(family, *UPDATES) for family in FAMILIES},
    **{f"{family}, epochs": training(family, *FOUR) for family in FAMILIES},
    "hydra": hydra,
    "preprocessing": binarize,
    "glue": fine_tuning,
    "squad train": reading,
    "compare": compare,
    "bleu": bleu,
}


def choose(names: Sequence[str], rng: random.Random) -> list[str]:
    """Return jobs in an order of chance, all of them without a name."""
    chosen = [name for name in JOBS if not names or any(part in name for part in names)]
    return rng.sample(chosen, len(chosen))
