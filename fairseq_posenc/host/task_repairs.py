"""Repairs ``--patience``, ``--mask-whole-words`` and resumption in fairseq's tasks.

fairseq_posenc.host.preparation calls the functions before a command reads a checkpoint.
"""

import logging
import sys
from typing import Any

from fairseq.data.encoders import BPE_REGISTRY
from fairseq.dataclass.configs import CheckpointConfig
from omegaconf import OmegaConf
from omegaconf.errors import ConfigKeyError

from fairseq_posenc.errors import UserError

logger = logging.getLogger(__name__)
_PATIENCE_KEY = "patience"  # of the count in a checkpoint's extra state


def read_patience(checkpoint: CheckpointConfig) -> dict[str, Any]:
    """Return the count of ``--patience``, to be written to checkpoints; empty without a count.

    fairseq keeps it only in memory, so a training that is resumed ends later than an uninterrupted
    one (fairseq #3531).
    """
    best = getattr(_find_counter(), "best", None)
    if checkpoint.patience <= 0 or best is None:
        return {}
    metric = checkpoint.best_checkpoint_metric
    progress = {"metric": metric, "best": float(best), "runs": _find_counter().num_runs}
    return {_PATIENCE_KEY: progress}


def restore_patience(extra_state: dict[str, Any], checkpoint: CheckpointConfig) -> None:
    """Restore the count of ``--patience`` from the extra state of the checkpoint to resume from.

    Raises:
        SystemExit: with 0, if the training had already ended; fairseq would train on until the
            next validation.
    """
    counter, progress = _find_counter(), extra_state.get(_PATIENCE_KEY)
    if checkpoint.patience <= 0 or counter is None or not progress:
        return
    is_reset = checkpoint.reset_meters or checkpoint.reset_dataloader
    if is_reset or progress["metric"] != checkpoint.best_checkpoint_metric:
        return
    counter.best = progress["best"]
    counter.num_runs = progress["runs"]
    is_same_training = checkpoint.restore_file == CheckpointConfig.restore_file
    if counter.num_runs >= checkpoint.patience and is_same_training:
        logger.warning(
            f"{checkpoint.save_dir}: {counter.num_runs} validations without improvement reach "
            f"--patience {checkpoint.patience}: the training is finished, and nothing was changed"
        )
        raise SystemExit(0)


def _find_counter() -> Any:
    """Find fairseq's function that keeps the count in its attributes; None outside of its command.

    ``best`` is the best value of the metric, ``num_runs`` the number of validations since then.
    """
    # `python -m fairseq_cli.train` has the module under another name.
    modules = [sys.modules.get(name) for name in ("__main__", "fairseq_cli.train")]
    functions = [getattr(module, "should_stop_early", None) for module in modules]
    return next(filter(None, functions), None)


def prepare_whole_words(task: Any) -> None:
    """Give the options of ``--bpe`` to a task that masks whole words.

    fairseq's ``masked_lm`` reads them from ``task.args``. It has had no such attribute since its
    options became a dataclass, so ``--mask-whole-words`` fails with an AttributeError in fairseq.

    Args:
        task: the task; it is changed only if it masks whole words.

    Raises:
        UserError: ``--bpe`` is missing, or its pieces do not show where a word begins.
    """
    if not getattr(getattr(task, "cfg", None), "mask_whole_words", False):
        return
    try:
        bpe = OmegaConf.select(task.cfg, "..bpe")  # the section beside the task's
    except ConfigKeyError:  # settings of a task alone
        bpe = None
    name = bpe if isinstance(bpe, str) else getattr(bpe, "_name", None)
    suitable = [key for key, cls in BPE_REGISTRY.items() if hasattr(cls, "is_beginning_of_word")]
    if name not in suitable:
        reason = f"--bpe {name} does not show" if name else "without --bpe fairseq does not know"
        raise UserError(
            f"--mask-whole-words: {reason} where a word begins, and would mask single pieces; give "
            f"the --bpe that the data were made with, and its files: one of {', '.join(suitable)}"
        )
    task.args = bpe


def keep_batches(task: Any) -> None:
    """Let a resumed training group its examples into batches as an uninterrupted one does.

    fairseq groups them once in a command, with a seed of the epoch that the command begins with, so
    a training that is resumed in a later epoch would have other batches.
    """
    build = task.get_batch_iterator

    def get_batch_iterator(dataset: Any, *args: Any, epoch: int = 1, **options: Any) -> Any:
        renewed = options.get("disable_iterator_cache") or options.get("update_epoch_batch_itr")
        is_built = dataset in task.dataset_to_epoch_iter
        if epoch == 1 or renewed or is_built or not task.can_reuse_epoch_itr(dataset):
            return build(dataset, *args, epoch=epoch, **options)
        iterator = build(dataset, *args, epoch=1, **options)
        dataset.set_epoch(epoch)
        return iterator

    task.get_batch_iterator = get_batch_iterator
