"""The count of ``--patience``, kept in checkpoints.

fairseq keeps it in memory only, so that a training that is stopped and started again ends later
than an undisturbed one (fairseq #3531). Its checkpoints take what a task gives them, though.
"""

from __future__ import annotations

import logging
from typing import Any

from fairseq.dataclass.configs import CheckpointConfig

logger = logging.getLogger(__name__)
_KEY = "patience"


def keep_patience(task: Any, checkpoint: Any, counter: Any) -> None:
    """Have a task put the count into checkpoints, and take it from the one that it goes on from.

    ``checkpoint`` is fairseq's section of that name, ``counter`` its function
    ``should_stop_early``, whose attributes are the count.
    """
    if checkpoint.patience <= 0:
        return
    task_state: Any = getattr(task, "get_checkpoint_dict", lambda: {})
    take_task_state: Any = getattr(task, "set_checkpoint_dict", lambda state: None)
    name = type(task).__name__
    metric = checkpoint.best_checkpoint_metric

    def get_checkpoint_dict() -> dict[str, Any]:
        state = dict(task_state())
        best = getattr(counter, "best", None)
        if best is not None:
            count = {"metric": metric, "best": float(best), "runs": counter.num_runs}
            state[name] = {**state.get(name, {}), _KEY: count}
        return state

    def set_checkpoint_dict(state: dict[str, Any]) -> None:
        take_task_state({key: value for key, value in state.items() if key != _KEY})
        count = state.get(_KEY)
        if not count or count["metric"] != metric or checkpoint.reset_meters:
            return
        counter.best = count["best"]
        counter.num_runs = count["runs"]
        restores_own = checkpoint.restore_file == CheckpointConfig.restore_file
        if count["runs"] >= checkpoint.patience and restores_own:
            logger.warning(
                f"{checkpoint.save_dir}: {count['runs']} validations without improvement reach "
                f"--patience {checkpoint.patience}: the training is finished, and nothing was "
                "changed"
            )
            raise SystemExit(0)

    task.get_checkpoint_dict = get_checkpoint_dict
    task.set_checkpoint_dict = set_checkpoint_dict
