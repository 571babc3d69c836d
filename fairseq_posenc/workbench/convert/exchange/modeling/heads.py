"""Computes the scores of the models' heads, and their losses.

Exported folders hold a copy of this module (see the package).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import ACT2FN
from transformers.loss.loss_utils import fixed_cross_entropy

from fairseq_posenc.workbench.convert.exchange.modeling.configuration import PosencConfig
from fairseq_posenc.workbench.convert.exchange.modeling.inputs import check_labels


def cross_entropy(logits: Tensor, labels: Tensor, num_items: Any = None) -> Tensor:
    """Compute the mean cross entropy where labels are not -100.

    Args:
        logits: scores, ``(..., symbols)``.
        labels: labels, ``(...)``.
        num_items: number, or tensor of one, by which the sum is divided: ``Trainer`` gives that of
            several batches of an update. By default the number of these labels.
    """
    check_labels(labels, logits.shape[:-1])
    return fixed_cross_entropy(logits.flatten(0, -2).float(), labels.flatten(), num_items)


def squared_error(logits: Tensor, labels: Tensor, num_items: Any = None) -> Tensor:
    """Compute the mean squared error of scores ``(B, 1)``; see :func:`cross_entropy`."""
    if labels.numel() != len(logits):
        raise ValueError(f"labels must be {len(logits)} numbers, not {tuple(labels.shape)}")
    scores, targets = logits.flatten().float(), labels.flatten().float()
    if num_items is None:
        return F.mse_loss(scores, targets)
    return F.mse_loss(scores, targets, reduction="sum") / num_items


def resize_rows(weight: Tensor, size: int) -> Tensor:
    """Cut a weight to ``size`` rows, or pad it with zeros."""
    kept = weight.detach()[:size]
    padding = kept.new_zeros(size - kept.size(0), *kept.shape[1:])
    return torch.cat([kept, padding])


class LMHead(nn.Module):
    """RoBERTa's head for masked tokens."""

    def __init__(self, config: PosencConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.activation = ACT2FN[config.head_activation]
        self.layer_norm = nn.LayerNorm(config.hidden_size)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))
        if not config.tied_output:
            self.weight = nn.Parameter(torch.zeros(config.vocab_size, config.hidden_size))

    def forward(self, x: Tensor, embeddings: Tensor) -> Tensor:
        """Compute scores ``(B, T, symbols)``, with ``embeddings`` as weights if they are tied."""
        x = self.layer_norm(self.activation(self.dense(x)))
        return F.linear(x, getattr(self, "weight", embeddings), self.bias)


class ClassificationHead(nn.Module):
    """RoBERTa's head for sentences, on their first token."""

    def __init__(self, config: PosencConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.activation = ACT2FN[config.head_activation]
        self.out_proj = nn.Linear(config.hidden_size, config.num_labels)

    def forward(self, x: Tensor) -> Tensor:
        """Compute scores ``(B, classes)``."""
        return self.out_proj(self.activation(self.dense(x[:, 0])))
