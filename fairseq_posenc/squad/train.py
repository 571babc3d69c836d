"""Fine-tuning with fairseq's own command.

The configuration lies in the folder of the results, so the folder tells what it was made with, and
the same call again goes on where the first one stopped.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Optional

from omegaconf import DictConfig, OmegaConf

from fairseq_posenc.compare.training import newest_checkpoint
from fairseq_posenc.errors import UserError
from fairseq_posenc.running.pretrained import read_pretrained
from fairseq_posenc.running.programs import run_logged
from fairseq_posenc.squad.config import configuration, recipe
from fairseq_posenc.tasks.squad.databin import open_data_bin

CONFIG, LOG, LAST = "finetune.yaml", "train.log", "checkpoint_last.pt"
# How hydra and fairseq write the lines that tell how far a training is.
_SHOWN = re.compile(
    r"(?:\]\[|\| )(train_inner|train|valid|fairseq_posenc\.\S+)(?:\]\[INFO\] - | \| )(.+)"
)


def train(
    checkpoint: Path, data: Path, out: Path, yaml_file: Optional[Path], changes: Sequence[str]
) -> Path:
    """Fine-tune a model, or go on with it.

    Args:
        checkpoint: the pre-trained model.
        data: folder made by ``preprocess/squad.py``.
        out: folder of the results.
        yaml_file: the recipe; None for that of the data.
        changes: ``key=value`` that override the recipe.

    Returns:
        The fine-tuned model.

    Raises:
        UserError: wrong input, or fairseq failed.
    """
    pretrained, data_bin = read_pretrained(checkpoint, "--checkpoint"), open_data_bin(data)
    pretrained.check_dictionary(data_bin.dictionary)
    config = configuration(pretrained, data_bin, out, yaml_file or recipe(data_bin), changes)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {out}: {error.strerror}; name another folder") from None
    with open(out / "lock", "w") as lock:
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"--out {out}: another run is writing there; wait for it") from None
        _write(config, out / CONFIG)
        _mend(out)
        where = ["--config-dir", str(out.resolve()), "--config-name", Path(CONFIG).stem]
        run_logged(["fairseq-hydra-train", *where], out / LOG, lock.fileno(), _show)
    return out / LAST


def _write(config: DictConfig, path: Path) -> None:
    """Write the configuration; if there is one, it has to be the same.

    Raises:
        UserError: it differs; the message says where.
    """
    if path.exists():
        before = _flat(OmegaConf.to_container(OmegaConf.load(path)))
        now = _flat(OmegaConf.to_container(config))
        changed = [key for key in {**before, **now} if before.get(key) != now.get(key)]
        if changed:
            key = changed[0]
            raise UserError(
                f"--out {path.parent}: holds a training with other settings ({key}: "
                f"{before.get(key)} before, {now.get(key)} now); choose another --out"
            )
        return
    temporary = path.with_suffix(".new")
    temporary.write_text(f"# @package _group_\n{OmegaConf.to_yaml(config)}", encoding="utf-8")
    os.replace(temporary, path)


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {name: value}
    parts = [_flat(part, f"{name}.{key}" if name else str(key)) for key, part in value.items()]
    return {key: leaf for part in parts for key, leaf in part.items()}


def _mend(out: Path) -> None:
    """Replace a last checkpoint that was not written to its end by the newest whole one."""
    last = out / LAST
    if last.exists() and not zipfile.is_zipfile(last):
        last.unlink()
        if newest := newest_checkpoint(out):
            shutil.copyfile(newest, last.with_suffix(".new"))
            os.replace(last.with_suffix(".new"), last)


def _show(line: str) -> None:
    """Print what tells how far a training is; the log has everything."""
    if found := _SHOWN.search(line):
        print(f"{found[1].rpartition('.')[2]}: {found[2]}", file=sys.stderr, flush=True)
