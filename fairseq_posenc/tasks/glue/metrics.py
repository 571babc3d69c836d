"""Computes GLUE's metrics, in percent, for the criterion and the official scores.

An undefined metric, such as the correlation with a constant, is 0, as in scikit-learn's Matthews
correlation; with NaN, fairseq would forget the best value so far.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor


def confusion(predictions: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Count examples by label (row) and prediction (column): from (N,) to int64 (C, C)."""
    pairs = labels.long() * classes + predictions.long()
    return torch.bincount(pairs, minlength=classes**2).view(classes, classes)


def accuracy(counts: Tensor) -> float:
    """Compute the share of correct predictions."""
    return 100.0 * _divide(counts.diagonal().sum().item(), counts.sum().item())


def f1(counts: Tensor) -> float:
    """Compute the F1 of class 1 against class 0."""
    correct = counts[1, 1].item()
    return 100.0 * _divide(2 * correct, counts[1].sum().item() + counts[:, 1].sum().item())


def matthews(counts: Tensor) -> float:
    """Compute Matthews' correlation, for any number of classes (Gorodkin 2004)."""
    counts = counts.double()
    by_label = counts.sum(1)
    by_prediction = counts.sum(0)
    total = counts.sum()
    covariance = total * counts.diagonal().sum() - by_label @ by_prediction
    spread = (total**2 - by_label @ by_label) * (total**2 - by_prediction @ by_prediction)
    return 100.0 * _divide(covariance.item(), math.sqrt(spread.item()))


def list_metrics(classes: int) -> dict[str, Callable[[Tensor], float]]:
    """List the metrics of a confusion matrix by name; F1 and Matthews only for two classes."""
    binary = {"f1": f1, "matthews": matthews}
    return {"accuracy": accuracy, **(binary if classes == 2 else {})}


def classification(counts: Tensor) -> dict[str, float]:
    """Compute all metrics of a confusion matrix."""
    return {name: compute(counts) for name, compute in list_metrics(len(counts)).items()}


def regression(predictions: Tensor, scores: Tensor) -> dict[str, float]:
    """Compute the correlations of predicted scores, (N,), with the true ones."""
    from scipy.stats import pearsonr, spearmanr  # takes a second

    if has_no_ranking(predictions) or has_no_ranking(scores):
        return {"pearson": 0.0, "spearman": 0.0}
    vectors = predictions.double().cpu().numpy(), scores.double().cpu().numpy()
    measures = {"pearson": pearsonr, "spearman": spearmanr}
    return {name: 100.0 * float(measure(*vectors).statistic) for name, measure in measures.items()}


def has_no_ranking(scores: Tensor) -> bool:
    """Check whether scores, (N,), are empty, all equal, or not all finite."""
    return not scores.isfinite().all() or len(scores.unique()) < 2


def _divide(part: float, whole: float) -> float:
    """Divide; 0 if the quotient is undefined."""
    return part / whole if whole and math.isfinite(part / whole) else 0.0
