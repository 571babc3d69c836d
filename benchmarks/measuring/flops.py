"""Counts the operations of a model's matrix products; builds a large product to compare with.

A product of ``(a, b)`` and ``(b, c)`` is 2abc operations. C is the width, F the width of the
feed-forward part, V the vocabulary, n the length. For each token, the forward pass has:

    layer        2 (4 C^2 + 2 C F) + 4 n C    projections and feed-forward; q.k and weights.v
    cross        2 (4 C^2) + 4 n C            in a decoder of an encoder-decoder, too
    output       2 C V                        for predicted tokens; in a masked LM, 2 C^2 more

A training step has three times as many: forward, and the gradients of both factors. Causal
attention counts as a whole, as it is computed. The count is the same for every encoding: operations
of encodings are not part of it, so their time lowers the utilization (operations per second of a
step, divided by those of a large product, the ceiling).

Source: the counting of Chowdhery et al. (2022), "PaLM", arXiv:2204.02311, appendix B, without its
shortcuts for C and F.
"""

from __future__ import annotations

import torch

from measuring.families import Case
from measuring.timing import Pass

TRAINING = 3  # times the forward pass
MASKED_EVERY = 7  # fairseq's dummy task predicts tokens 2, 9, 16, ... of a block
CEILING_SIZE = {"cpu": 1024, "cuda": 8192}


def model_flops(case: Case, vocabulary: int) -> int:
    """Count the operations of a training step; V is ``vocabulary``, as padded by the task."""
    width, n, layers = case.size.embed_dim, case.length, case.size.layers
    attention = 2 * 4 * width**2 + 4 * n * width
    layer = attention + 2 * 2 * width * case.size.ffn_dim
    output = 2 * width * vocabulary
    if case.family == "masked_lm":
        predicted = len(range(2, n, MASKED_EVERY))
        sentence = n * layers * layer + predicted * (output + 2 * width**2)
    elif case.family == "causal_lm":
        sentence = n * (layers * layer + output)
    else:  # translation: layers of encoder and decoder, and attention to the encoder
        sentence = n * (2 * layers * layer + layers * attention + output)
    return TRAINING * case.batch * sentence


def build_ceiling(dtype: torch.dtype, device: torch.device) -> tuple[Pass, int]:
    """Build a pass to time, the product of two large square matrices, and count its operations."""
    size = CEILING_SIZE[device.type]
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(left)

    def run() -> None:
        torch.matmul(left, right, out=out)

    return run, 2 * size**3
