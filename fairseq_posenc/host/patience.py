"""Keeps the count of ``--patience`` in checkpoints, through the state of the task.

fairseq keeps it only in memory, so a training that is resumed ends later than an uninterrupted one
(fairseq #3531).
"""

import logging
from typing import Any

from fairseq.dataclass.configs import CheckpointConfig

logger = logging.getLogger(__name__)
_KEY = "patience"


def keep_patience(task: Any, checkpoint: Any, counter: Any) -> None:
    """Make a task write the count to checkpoints, and read it when the training is resumed.

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
