"""Fine-tunes with fairseq's own command.

The configuration is written into the folder of the results; the same call continues a training
that was stopped.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Optional, cast

from omegaconf import OmegaConf

from fairseq_posenc.checkpoints.recovery import LAST, ensure_last_checkpoint
from fairseq_posenc.tasks.squad.databin import open_data_bin
from fairseq_posenc.workbench.finetuning.squad.config import compose, find_recipe
from fairseq_posenc.workbench.loading.checkpoints import updates_done
from fairseq_posenc.workbench.loading.pretrained import read_pretrained
from fairseq_posenc.workbench.running.files import write_whole
from fairseq_posenc.workbench.running.locks import lock_folder
from fairseq_posenc.workbench.running.logs import format_progress
from fairseq_posenc.workbench.running.programs import run_logged
from fairseq_posenc.workbench.running.progress import say
from fairseq_posenc.workbench.running.stages import Stage

CONFIG, LOG = "finetune.yaml", "train.log"


def train(
    checkpoint: Path, data: Path, out: Path, yaml_file: Optional[Path], changes: Sequence[str]
) -> Path:
    """Fine-tune a model, or continue; return the path of the fine-tuned model.

    Args:
        checkpoint: the pre-trained model.
        data: folder made by ``preprocess/squad.py``.
        out: folder of the results.
        yaml_file: the recipe; None for that of the data.
        changes: ``key=value`` that override the recipe.

    Raises:
        UserError: wrong input, or fairseq failed.
    """
    pretrained, data_bin = read_pretrained(checkpoint, "--checkpoint"), open_data_bin(data)
    pretrained.check_dictionary(data_bin.dictionary)
    config = compose(pretrained, data_bin, out, yaml_file or find_recipe(data_bin), changes)
    with lock_folder(out) as lock:
        stage = Stage(out, cast("dict[str, Any]", OmegaConf.to_container(config)))
        stage.refuse_others(lambda: updates_done(out) > 0)
        stage.claim()
        write_whole(out / CONFIG, f"# @package _group_\n{OmegaConf.to_yaml(config)}")
        ensure_last_checkpoint(out)
        where = ["--config-dir", str(out.resolve()), "--config-name", Path(CONFIG).stem]
        run_logged(["fairseq-hydra-train", *where], out / LOG, lock, _show)
    return out / LAST


def _show(line: str) -> None:
    """Print the progress of a training; the log has everything."""
    if text := format_progress(line):
        say(text)
