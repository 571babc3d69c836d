#!/usr/bin/env python3
"""Print how many updates one epoch of fairseq-train has, given the same arguments.

    python train_scripts/updates_per_epoch.py data-bin/fr-en --max-tokens 4096 --update-freq 2

The number depends on how fairseq sorts sentences into batches and shares them out to GPUs
(``--distributed-world-size``), so the batches are made by fairseq itself.
"""

from __future__ import annotations

import logging
import warnings

from fairseq import options, tasks, utils
from fairseq.data.iterators import GroupedIterator
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from omegaconf import DictConfig


def updates_per_epoch(config: DictConfig) -> int:
    """Return the number of updates of the first epoch, as ``fairseq-train`` makes them.

    Args:
        config: fairseq's configuration of a training.

    Raises:
        UserError: ``--update-freq`` changes from epoch to epoch.
    """
    if len(config.optimization.update_freq) > 1:
        # Not at the top: fairseq wants to be the first to import what --user-dir names.
        from fairseq_posenc.errors import UserError

        raise UserError("--update-freq: give one number, so that all epochs have as many updates")
    task = tasks.setup_task(config.task)
    task.load_dataset(config.dataset.train_subset, combine=True, epoch=1)
    # The model says how long a sentence may be; longer ones are left out.
    longest = task.build_model(config.model).max_positions()
    skip = config.optimization.skip_remainder_batch
    batches = task.get_batch_iterator(
        dataset=task.dataset(config.dataset.train_subset),
        max_tokens=config.dataset.max_tokens,
        max_sentences=config.dataset.batch_size,
        max_positions=utils.resolve_max_positions(
            task.max_positions(), longest, config.dataset.max_tokens
        ),
        ignore_invalid_inputs=True,
        required_batch_size_multiple=config.dataset.required_batch_size_multiple,
        seed=config.common.seed,
        num_shards=config.distributed_training.distributed_world_size,
        skip_remainder_batch=skip,
        grouped_shuffling=config.dataset.grouped_shuffling,
    ).next_epoch_itr()
    return len(GroupedIterator(batches, config.optimization.update_freq[0], skip))


def main() -> None:
    """Run the program."""
    logging.disable(logging.INFO)  # what fairseq says would bury the number
    warnings.simplefilter("ignore")
    arguments = options.parse_args_and_arch(options.get_training_parser())
    print(updates_per_epoch(convert_namespace_to_omegaconf(arguments)))


if __name__ == "__main__":
    main()
