"""Computes GLUE's metrics, in percent, for the criterion and the official scores.

An undefined metric, such as the correlation with a constant, is 0, as in scikit-learn's Matthews
correlation; with NaN, fairseq would keep that checkpoint as the best.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F


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


def pearson(first: Tensor, second: Tensor) -> float:
    """Compute the correlation of two vectors, (N,)."""
    first, second = (x.double() - x.double().mean() for x in (first, second))
    return 100.0 * F.cosine_similarity(first, second, dim=0).item()


def spearman(first: Tensor, second: Tensor) -> float:
    """Compute the correlation of the ranks of two vectors, (N,)."""
    return pearson(_compute_ranks(first), _compute_ranks(second))


def classification(counts: Tensor) -> dict[str, float]:
    """Compute all metrics of a confusion matrix; F1 and Matthews only for two classes."""
    figures = {"accuracy": accuracy(counts)}
    if len(counts) == 2:
        figures |= {"f1": f1(counts), "matthews": matthews(counts)}
    return figures


def regression(predictions: Tensor, scores: Tensor) -> dict[str, float]:
    """Compute all metrics of predicted scores, (N,)."""
    if has_no_ranking(predictions):
        return {"pearson": 0.0, "spearman": 0.0}  # rounding errors would correlate a little
    return {"pearson": pearson(predictions, scores), "spearman": spearman(predictions, scores)}


def has_no_ranking(predictions: Tensor) -> bool:
    """Check whether predicted scores, (N,), are all equal, or not all finite."""
    return not predictions.isfinite().all() or bool((predictions == predictions[0]).all())


def _compute_ranks(values: Tensor) -> Tensor:
    """Rank values from 1; equal values share their mean rank: 5, 7, 7 to 1, 2.5, 2.5."""
    _, group, sizes = values.unique(sorted=True, return_inverse=True, return_counts=True)
    last = sizes.cumsum(0).double()
    return (last - (sizes - 1) / 2)[group]


def _divide(part: float, whole: float) -> float:
    """Divide; 0 if the quotient is undefined."""
    return part / whole if whole and math.isfinite(part / whole) else 0.0
