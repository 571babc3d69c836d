"""Composes the YAML files of ``finetune_configs`` and ``train_scripts/configs`` as fairseq does."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig

from fairseq_posenc.tasks.glue.definitions import Task

try:
    from hydra import compose, initialize_config_dir

    _HYDRA_VERSION = {"version_base": "1.1"}
except ImportError:  # hydra 1.0, which the official fairseq requires
    from hydra.experimental import compose, initialize_config_dir  # type: ignore[assignment]

    _HYDRA_VERSION = {}


def compose_file(path: Path, overrides: Sequence[str] = ()) -> DictConfig:
    """Compose the configuration of a file and of its defaults.

    After fairseq's ``hydra_init`` with the file's name, fairseq's defaults are merged in, and
    overrides of unknown options are refused.

    Raises:
        HydraException: the file does not exist, or an override cannot be read.
        OmegaConfBaseException: a value has a wrong type.
    """
    GlobalHydra.instance().clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of hydra, about fairseq's use of it
        with initialize_config_dir(str(path.parent.resolve()), **_HYDRA_VERSION):
            return compose(path.stem, list(overrides))


def count_updates(config: Any, examples: int) -> int:
    """Count the updates of all epochs of a fine-tuning; an epoch reads every example once."""
    batches = math.ceil(examples / config.dataset.batch_size)
    steps = config.distributed_training.distributed_world_size * config.optimization.update_freq[0]
    return math.ceil(batches / steps) * config.optimization.max_epoch


def config_name(protocol: str, task: Task) -> str:
    """Build the name of a GLUE task's configuration, such as ``decbert_cola``."""
    return f"{protocol}_{task.name.lower().replace('-', '')}"
