"""Checks ``--best-checkpoint-metric`` before the first update, not after the first validation."""

from typing import Any

from fairseq.logging import metrics

from fairseq_posenc.errors import UserError
from fairseq_posenc.host.frames import find_call

_BETTER_LOW = {"loss", "nll_loss", "ppl"}
_BETTER_HIGH = {"accuracy", "bleu", "f1", "acc_and_f1", "mcc", "pearson", "spearman"}


def check_direction(checkpoint: Any) -> None:
    """Check that the best checkpoint is chosen by the highest accuracy or the lowest loss.

    Raises:
        UserError: ``--maximize-best-checkpoint-metric`` is missing, or wrong for the metric.
    """
    metric, flag = checkpoint.best_checkpoint_metric, "--maximize-best-checkpoint-metric"
    if metric in _BETTER_HIGH and not checkpoint.maximize_best_checkpoint_metric:
        raise UserError(
            f"--best-checkpoint-metric {metric} would keep the checkpoint with the lowest {metric} "
            f"as the best: add {flag}"
        )
    if metric in _BETTER_LOW and checkpoint.maximize_best_checkpoint_metric:
        raise UserError(
            f"{flag} would keep the checkpoint with the highest {metric} as the best: leave it out"
        )


def check_metric() -> None:
    """Check that validation computes the metric, by validating one batch with the model.

    Called when fairseq is about to read a validation subset for the first time. With the metric
    ``loss``, which always exists, nothing is computed.

    Raises:
        UserError: the metric is unknown; the message lists the known ones.
    """
    call = find_call("fairseq_cli/train.py", "main")
    if call is None or call.f_locals["cfg"].checkpoint.best_checkpoint_metric == "loss":
        return
    local = call.f_locals
    settings, trainer, subset = local["cfg"], local["trainer"], local["subset"]
    wanted = settings.checkpoint.best_checkpoint_metric
    if wanted == "bleu" and getattr(settings.task, "eval_bleu", False):
        return  # BLEU may be undefined for one batch: a new model may translate it to nothing
    batches = trainer.get_valid_iterator(subset).next_epoch_itr(
        shuffle=False, set_dataset_epoch=False
    )
    with metrics.aggregate(new_root=True) as measured:
        trainer.valid_step(next(iter(batches)))
    names = sorted(name for name in measured.get_smoothed_values() if not name.startswith("_"))
    if wanted not in names:
        raise UserError(
            f"--best-checkpoint-metric {wanted}: validation on {subset!r} has no such figure; it "
            f"has {', '.join(names)}"
        )
