"""Counts the updates in an epoch of ``fairseq-train``.

The number depends on how fairseq groups sentences into batches and divides them among GPUs, so
fairseq itself makes the batches here.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from fairseq import options, tasks, utils
from fairseq.data.iterators import GroupedIterator
from fairseq.dataclass.utils import convert_namespace_to_omegaconf

from fairseq_posenc.errors import UserError


def count_updates_per_epoch(words: Sequence[str]) -> int:
    """Count the updates in the first epoch, given the arguments of fairseq-train.

    Raises:
        UserError: ``--update-freq`` changes from epoch to epoch.
    """
    with _silence_fairseq():
        parsed = options.parse_args_and_arch(options.get_training_parser(), list(words))
        config = convert_namespace_to_omegaconf(parsed)
        if len(config.optimization.update_freq) > 1:
            raise UserError(
                "--update-freq: give a single number, so that all epochs have the same length"
            )
        task = tasks.setup_task(config.task)
        task.load_dataset(config.dataset.train_subset, combine=True, epoch=1)
        # The model limits the length of sentences; longer ones are left out.
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


@contextmanager
def _silence_fairseq() -> Iterator[None]:
    """Silence fairseq, which would log as if a training had begun."""
    before = logging.root.manager.disable
    logging.disable(logging.INFO)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
