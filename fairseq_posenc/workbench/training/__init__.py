"""Lets ``fairseq-hydra-train`` run the configurations of ``train_scripts/configs``.

They name :class:`LoadPlugin` as a callback of hydra, and use resolvers: ``share`` and ``steps``
divide an update among GPUs, ``name_data`` names the data, and ``plugin`` is this package's path.
"""

from pathlib import Path

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from fairseq_posenc.errors import UserError, counted
from fairseq_posenc.transformer.options import refuse_unknown_settings
from fairseq_posenc.user_dir import USER_DIR, register


def share_batch(batch: int, most: int, world_size: int) -> int:
    """Find the largest batch of a GPU, at most ``most``, from which an update can be built.

    Args:
        batch: size of an update, in sequences.
        most: largest batch that fits the memory of a GPU.
        world_size: number of GPUs.

    Raises:
        UserError: no batch gives such an update.
    """
    for size in range(most, 0, -1):
        if batch % (size * world_size) == 0:
            return size
    sequences, gpus = counted(batch, "sequences"), counted(world_size, "GPUs")
    raise UserError(f"{sequences} cannot be divided among {gpus}: set CUDA_VISIBLE_DEVICES")


def count_steps(batch: int, batch_size: int, world_size: int) -> int:
    """Count the batches that each GPU adds to an update (``update_freq``).

    Args:
        batch: size of an update, in sequences or tokens.
        batch_size: size of a GPU's batch, in the same unit.
        world_size: number of GPUs.

    Raises:
        UserError: the update is not a multiple of the batches.
    """
    steps, rest = divmod(batch, batch_size * world_size)
    if rest or not steps:
        batches = f"batches of {batch_size} on {counted(world_size, 'GPUs')}"
        advice = "change dataset.batch_size (translation: dataset.max_tokens)"
        raise UserError(f"an update of {batch} cannot be made of {batches}: {advice}")
    return steps


def name_data(paths: str) -> str:
    """Name the data of a run by its folder or, for shards (joined by colons), by their folder."""
    return Path(paths.split(":")[0]).absolute().parts[-2 if ":" in paths else -1]


OmegaConf.register_new_resolver("share", share_batch, replace=True)  # or a second import fails
OmegaConf.register_new_resolver("steps", count_steps, replace=True)
OmegaConf.register_new_resolver("name_data", name_data, replace=True)
OmegaConf.register_new_resolver("plugin", lambda: str(USER_DIR), replace=True)


class LoadPlugin(Callback):
    """Loads the plugin, which prints errors as one line, before fairseq can raise its first."""

    def on_job_start(self, config: DictConfig, **kwargs: object) -> None:
        """Load the plugin, and check the model's settings; hydra calls this before a run."""
        register()
        if config.common.user_dir == str(USER_DIR):  # else the model may be the user's own
            refuse_unknown_settings(config.model)
