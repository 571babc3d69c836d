"""Composes the YAML files of ``finetune_configs``.

``fairseq-hydra-train`` composes them in the same way, but has no function for it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]

# Errors that a file of settings, or a value of a wrong type in it, raises where it is used.
CONFIG_ERRORS = (
    HydraException,
    OmegaConfBaseException,
    YAMLError,
    TypeError,
    ValueError,
    AttributeError,
    LookupError,
    ArithmeticError,
    AssertionError,  # of omegaconf
)


def compose_file(path: Path, overrides: Sequence[str] = ()) -> DictConfig:
    """Compose the configuration of a file and of its defaults.

    Call fairseq's ``hydra_init(path.stem)`` first to also merge in fairseq's own defaults and to
    refuse overrides of unknown options. Any other earlier use of hydra in this process is ended.

    Raises:
        HydraException: the file does not exist, or an override cannot be read; for more errors see
            :data:`CONFIG_ERRORS`.
    """
    GlobalHydra.instance().clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # hydra warns about fairseq's configuration
        with initialize_config_dir(str(path.parent.resolve()), version_base="1.1"):
            return compose(path.stem, list(overrides))


def count_updates(config: DictConfig, examples: int) -> int:
    """Count the updates of all epochs of a fine-tuning; an epoch reads every example once.

    fairseq allows an ``update_freq`` for each epoch; these files have one for all.
    """
    batches = math.ceil(examples / config.dataset.batch_size)
    devices = config.distributed_training.distributed_world_size
    batches_per_update = devices * config.optimization.update_freq[0]
    return math.ceil(batches / batches_per_update) * config.optimization.max_epoch
