"""Names, composes and reads the YAML files of ``finetune_configs`` and ``train_scripts/configs``.

They are composed with hydra as by ``fairseq-hydra-train``, which is a program and not a function.
"""

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

    _VERSION_ARGUMENT = {"version_base": "1.1"}
except ImportError:  # hydra 1.0, which the official fairseq requires
    from hydra.experimental import compose, initialize_config_dir  # type: ignore[assignment]

    _VERSION_ARGUMENT = {}


def compose_file(path: Path, overrides: Sequence[str] = ()) -> DictConfig:
    """Compose the configuration of a file and of its defaults.

    Call fairseq's ``hydra_init(path.stem)`` first to also merge in fairseq's own defaults and to
    refuse overrides of unknown options. An earlier initialisation of hydra in this process ends.

    Raises:
        HydraException: the file does not exist, or an override cannot be read.
        OmegaConfBaseException: a value has a wrong type.
    """
    GlobalHydra.instance().clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of hydra, about fairseq's use of it
        with initialize_config_dir(str(path.parent.resolve()), **_VERSION_ARGUMENT):
            return compose(path.stem, list(overrides))


def count_updates(config: Any, examples: int) -> int:
    """Count the updates of all epochs of a fine-tuning; an epoch reads every example once.

    fairseq allows an ``update_freq`` for each epoch; these files have one for all.
    """
    batches = math.ceil(examples / config.dataset.batch_size)
    devices = config.distributed_training.distributed_world_size
    batches_per_update = devices * config.optimization.update_freq[0]
    return math.ceil(batches / batches_per_update) * config.optimization.max_epoch


def config_name(protocol: str, task: Task) -> str:
    """Build the name of a GLUE task's file by a paper's protocol, such as ``decbert_cola``."""
    return f"{protocol}_{task.name.lower().replace('-', '')}"
