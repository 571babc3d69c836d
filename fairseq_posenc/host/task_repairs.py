"""Repairs two options of fairseq's tasks, ``--patience`` and ``--mask-whole-words``.

Our models call both functions when a command builds them, before it reads a checkpoint.
"""

import logging
import sys
from typing import Any

from fairseq.data.encoders import BPE_REGISTRY
from fairseq.dataclass.configs import CheckpointConfig

from fairseq_posenc.errors import UserError

logger = logging.getLogger(__name__)
_PATIENCE_KEY = "patience"  # of the progress in a task's state


def keep_patience(task: Any, options: Any) -> None:
    """Make a task write the count of ``--patience`` to checkpoints, and read it on resumption.

    fairseq keeps it only in memory, so a training that is resumed ends later than an uninterrupted
    one (fairseq #3531).

    Args:
        task: fairseq's task; two of its methods are replaced.
        options: fairseq's settings in the section ``checkpoint``.
    """
    # Its attributes hold the count: `best`, the best value of the metric, and `num_runs`, the
    # validations since then. `python -m fairseq_cli.train` has the module under another name.
    modules = [sys.modules.get(name) for name in ("__main__", "fairseq_cli.train")]
    functions = [getattr(module, "should_stop_early", None) for module in modules]
    should_stop_early: Any = next(filter(None, functions), None)
    if options.patience <= 0 or should_stop_early is None:
        return
    # Only tasks with a state of their own have these methods.
    get_own_state: Any = getattr(task, "get_checkpoint_dict", lambda: {})
    set_own_state: Any = getattr(task, "set_checkpoint_dict", lambda state: None)
    class_name = type(task).__name__
    metric = options.best_checkpoint_metric

    def get_checkpoint_dict() -> dict[str, Any]:
        states = dict(get_own_state())
        best = getattr(should_stop_early, "best", None)
        if best is not None:
            progress = {"metric": metric, "best": float(best), "runs": should_stop_early.num_runs}
            states[class_name] = {**states.get(class_name, {}), _PATIENCE_KEY: progress}
        return states

    def set_checkpoint_dict(state: dict[str, Any]) -> None:
        # fairseq passes back only the entry under the class's name.
        set_own_state({key: value for key, value in state.items() if key != _PATIENCE_KEY})
        progress = state.get(_PATIENCE_KEY)
        if not progress or progress["metric"] != metric or options.reset_meters:
            return
        should_stop_early.best = progress["best"]
        should_stop_early.num_runs = progress["runs"]
        # With the default --restore-file this is the run's own last checkpoint, so the training had
        # already ended; fairseq would train on until the next validation.
        is_same_training = options.restore_file == CheckpointConfig.restore_file
        if progress["runs"] >= options.patience and is_same_training:
            logger.warning(
                f"{options.save_dir}: {progress['runs']} validations without improvement reach "
                f"--patience {options.patience}: the training is finished, and nothing was "
                "changed"
            )
            raise SystemExit(0)

    task.get_checkpoint_dict = get_checkpoint_dict
    task.set_checkpoint_dict = set_checkpoint_dict


def prepare_whole_words(task: Any, bpe: Any) -> None:
    """Give the options of ``--bpe`` to a task that masks whole words.

    fairseq's ``masked_lm`` reads them from ``task.args``. It has had no such attribute since its
    options became a dataclass, so ``--mask-whole-words`` fails with an AttributeError in fairseq.

    Args:
        task: the task; it is changed only if it masks whole words.
        bpe: the name of ``--bpe``, or fairseq's section of this name; its ``build_bpe`` takes both.

    Raises:
        UserError: ``--bpe`` is missing, or its pieces do not show where a word begins.
    """
    if not getattr(getattr(task, "cfg", None), "mask_whole_words", False):
        return
    name = bpe if isinstance(bpe, str) else getattr(bpe, "_name", None)
    suitable = [key for key, cls in BPE_REGISTRY.items() if hasattr(cls, "is_beginning_of_word")]
    if name not in suitable:
        reason = f"--bpe {name} does not show" if name else "without --bpe fairseq does not know"
        raise UserError(
            f"--mask-whole-words: {reason} where a word begins, and would mask single pieces; give "
            f"the --bpe that the data were made with, and its files: one of {', '.join(suitable)}"
        )
    task.args = bpe
