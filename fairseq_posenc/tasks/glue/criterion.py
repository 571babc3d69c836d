"""Defines the criterion ``glue``, whose metrics are exact on any number of processes.

fairseq's own criterion logs lists, which processes cannot sum. This one logs values that can be
summed: for classes a confusion matrix; for scores, which are ranked, a vector over all examples.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from fairseq.criterions import FairseqCriterion, register_criterion
from fairseq.logging import metrics as log
from torch import Tensor

from fairseq_posenc.tasks.glue import metrics

HEAD = "sentence_classification_head"
# Names that begin with _ stay out of what fairseq prints.
_CONFUSION = "_confusion"
# Vectors over all examples: predicted scores, true scores, and 1 for each example seen.
_VECTORS = ("_predictions", "_scores", "_seen")
_PREDICTIONS, _SCORES, _SEEN = _VECTORS


@register_criterion("glue")
class GlueCriterion(FairseqCriterion):
    """Cross entropy of classes, squared error of scores."""

    def __init__(self, task: Any) -> None:
        super().__init__(task)
        self.regression = task.glue.regression  # of GlueTask: whether labels are scores

    def forward(self, model: Any, sample: Any) -> tuple[Tensor, int, dict[str, Tensor | int]]:
        """Compute the summed loss, the number of examples, and the values to log."""
        outputs, _ = model(**sample["net_input"], classification_head_name=HEAD)  # [B, classes]
        labels = sample["target"].view(-1)  # [B]
        logged: dict[str, Tensor | int] = {"ntokens": sample["ntokens"]}
        if self.regression:
            predictions = outputs.view(-1).float()
            loss = F.mse_loss(predictions, labels.float(), reduction="sum")
            if not model.training:  # sums of training may span epochs, with examples twice
                vectors = (predictions.detach(), labels, torch.ones_like(labels))  # [B]
                ids, size = sample["id"], sample["dataset_size"]  # the task glue adds the size
                logged |= {name: _scatter(x, ids, size) for name, x in zip(_VECTORS, vectors)}
        else:
            loss = F.cross_entropy(outputs.float(), labels, reduction="sum")
            logged[_CONFUSION] = metrics.confusion(outputs.argmax(-1), labels, outputs.size(-1))
        count = labels.numel()
        logged |= {"loss": loss.detach(), "sample_size": count, "nsentences": count}
        return loss, count, logged

    @staticmethod
    def logging_outputs_can_be_summed() -> bool:
        """Confirm that all logged values are sums."""
        return True

    @staticmethod
    def reduce_metrics(logging_outputs: list[dict[str, Any]]) -> None:
        """Log the loss, and the metrics over all examples since the last reset."""
        # All outputs have the same names, as they are of one data set.
        totals = {x: sum(output[x] for output in logging_outputs) for x in logging_outputs[0]}
        examples = totals["sample_size"]
        # Cross entropy is logged in bits, as everywhere in fairseq; a squared error has no unit.
        unit = math.log(2) if _CONFUSION in totals else 1.0
        log.log_scalar("loss", totals["loss"] / examples / unit, examples, round=4)
        if _CONFUSION in totals:
            counts = totals[_CONFUSION].round().long().cpu()  # processes exchange them as floats
            log.log_scalar_sum(_CONFUSION, counts)
            for name, metric in metrics.list_metrics(len(counts)).items():
                log.log_derived(name, partial(_classify, metric))  # computed when fairseq reads it
        if _SEEN in totals:  # not in training
            for name in _VECTORS:
                log.log_scalar_sum(name, totals[name].cpu())
            for name in ("pearson", "spearman"):
                log.log_derived(name, partial(_correlate, name))


def _scatter(values: Tensor, ids: Tensor, size: int) -> Tensor:
    """Scatter the values of a batch, [B], into zeros for all ``size`` examples, by their ids."""
    return values.new_zeros(size, dtype=torch.float64).scatter(0, ids, values.double())


def _classify(metric: Callable[[Tensor], float], meters: Any) -> float:
    """Compute a metric of the classes of all examples, from fairseq's meters by name."""
    return metric(meters[_CONFUSION].sum)


def _correlate(name: str, meters: Any) -> float:
    """Compute a metric of the scores of all examples, from fairseq's meters by name."""
    seen = meters[_SEEN].sum > 0
    return metrics.regression(meters[_PREDICTIONS].sum[seen], meters[_SCORES].sum[seen])[name]
