"""Repairs two options of fairseq's tasks, ``--patience`` and ``--mask-whole-words``."""

import logging
from typing import Any

from fairseq.data.encoders import BPE_REGISTRY
from fairseq.dataclass.configs import CheckpointConfig

from fairseq_posenc.errors import UserError

logger = logging.getLogger(__name__)
_KEY = "patience"


def keep_patience(task: Any, checkpoint: Any, counter: Any) -> None:
    """Make a task write the count of ``--patience`` to checkpoints, and read it on resumption.

    fairseq keeps it only in memory, so a training that is resumed ends later than an uninterrupted
    one (fairseq #3531).

    Args:
        task: fairseq's task; two of its methods are replaced.
        checkpoint: fairseq's settings in the section of this name.
        counter: fairseq's function ``should_stop_early``, whose attributes hold the count.
    """
    if checkpoint.patience <= 0:
        return
    get_task_state: Any = getattr(task, "get_checkpoint_dict", lambda: {})
    set_task_state: Any = getattr(task, "set_checkpoint_dict", lambda state: None)
    name = type(task).__name__
    metric = checkpoint.best_checkpoint_metric

    def get_checkpoint_dict() -> dict[str, Any]:
        state = dict(get_task_state())
        best = getattr(counter, "best", None)
        if best is not None:
            count = {"metric": metric, "best": float(best), "runs": counter.num_runs}
            state[name] = {**state.get(name, {}), _KEY: count}
        return state

    def set_checkpoint_dict(state: dict[str, Any]) -> None:
        set_task_state({key: value for key, value in state.items() if key != _KEY})
        count = state.get(_KEY)
        if not count or count["metric"] != metric or checkpoint.reset_meters:
            return
        counter.best = count["best"]
        counter.num_runs = count["runs"]
        is_same_training = checkpoint.restore_file == CheckpointConfig.restore_file
        if count["runs"] >= checkpoint.patience and is_same_training:
            logger.warning(
                f"{checkpoint.save_dir}: {count['runs']} validations without improvement reach "
                f"--patience {checkpoint.patience}: the training is finished, and nothing was "
                "changed"
            )
            raise SystemExit(0)

    task.get_checkpoint_dict = get_checkpoint_dict
    task.set_checkpoint_dict = set_checkpoint_dict


def prepare_whole_words(task: Any, bpe: Any) -> None:
    """Give a task that masks whole words the options of ``--bpe``, which splits words into pieces.

    fairseq's ``masked_lm`` reads them from ``task.args``, which it has lacked since its options
    became a dataclass: ``--mask-whole-words`` failed with an AttributeError.

    Args:
        task: the task; it is changed only if it masks whole words.
        bpe: the name of ``--bpe``, or fairseq's section of this name.

    Raises:
        UserError: ``--bpe`` is missing, or its pieces do not show where a word begins.
    """
    if not getattr(getattr(task, "cfg", None), "mask_whole_words", False):
        return
    name = bpe if isinstance(bpe, str) else getattr(bpe, "_name", None)
    known = [key for key, kind in BPE_REGISTRY.items() if hasattr(kind, "is_beginning_of_word")]
    if name not in known:
        reason = f"--bpe {name} does not show" if name else "without --bpe fairseq does not know"
        raise UserError(
            f"--mask-whole-words: {reason} where a word begins, and would mask single pieces; give "
            f"the --bpe that the data were made with, and its files: one of {', '.join(known)}"
        )
    task.args = bpe
