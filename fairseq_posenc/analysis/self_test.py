"""Compares a tiny forward pass of an encoding on each backend with the reference in float64.

``fairseq-posenc doctor`` shows the largest absolute differences, here called errors.
"""

import math

import torch
from torch import Tensor, nn

from fairseq_posenc.backends import BACKENDS, reference
from fairseq_posenc.backends.base import AttentionCall
from fairseq_posenc.modules.layer_positions import PositionEncoding
from fairseq_posenc.positions import Positions
from fairseq_posenc.shared import compute_shared

LENGTH, HEADS, HEAD_DIM = 6, 2, 8
LEAST_CHANGE = 1e-2  # a rotation must change a dot product by this; else it does nothing


@torch.no_grad()
def measure_errors(spec: str, backends: list[str], causal: bool) -> dict[str, float]:
    """Measure the largest error of the rotation, and of each backend that accepts the encoding.

    The products of rotated queries and keys depend on distances alone: the error of a rotation is
    how they change if all positions shift by 5, or infinity if the rotation does nothing. That of
    the input is infinity if vectors to add to it are missing, misshapen or not finite, else 0.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    encoding = PositionEncoding(spec, HEADS * HEAD_DIM, HEADS, 2 * LENGTH, causal).to(device)
    for parameter in encoding.parameters():
        nn.init.normal_(parameter)  # initial values can be too small to show a mistake
    query, key, value = torch.randn(3, 1, HEADS, LENGTH, HEAD_DIM, device=device)
    embedded = torch.randn(1, LENGTH, HEADS * HEAD_DIM, device=device)  # the layer's input
    counted = Positions.from_padding(torch.zeros(1, LENGTH, dtype=torch.bool, device=device))
    (shared,) = compute_shared(encoding.shared, counted)  # one state: one kind of layer
    added = [x.embed(shared.positions) for x in encoding.input.as_list()] if encoding.input else []
    works = all(x is not None and x.shape == embedded.shape and x.isfinite().all() for x in added)
    errors = {"the input": 0.0 if works else math.inf}

    mask = shared.mask.with_direction(encoding.direction)
    rotated_query, rotated_key = encoding.rotate_tokens(query, key, shared)
    moved = shared.positions._replace(drawn=shared.positions.query_ids + 5)  # read instead of ids
    later = shared._replace(positions=moved, rotation=encoding.shared.rotation(moved.query_ids))
    later_query, later_key = encoding.rotate_tokens(query, key, later)
    plain = query.double() @ key.double().mT
    products = rotated_query.double() @ rotated_key.double().mT
    shifted = later_query.double() @ later_key.double().mT
    rotates = any(item.encoding.acts_on == "rotation" for item in encoding.spec.items)
    does_nothing = rotates and (products - plain).abs().max() < LEAST_CHANGE
    errors["rotation"] = math.inf if does_nothing else float((shifted - products).abs().max())

    of_input = encoding.encodings.input_terms(embedded, shared.positions)  # forget gates, states
    terms = encoding.compute_terms(shared) | of_input  # as in a model
    call = AttentionCall(rotated_query, rotated_key, value, terms, mask)
    # The expected result has a row for each distance; in `compute_terms`, distances share rows. A
    # layer would project rows of DeBERTa's table; `encoding` has no projections and splits them.
    exact = (encoding.collect_terms(shared) | of_input).expanded().projected(_split)
    exact = exact.map(lambda x: x.double() if x.is_floating_point() else x)
    tokens = rotated_query.double(), rotated_key.double(), value.double()
    expected, _ = reference.attend(AttentionCall(*tokens, exact, mask))
    for name in backends:
        if not BACKENDS[name].refuses(call):  # a reason, or empty
            attended, _ = BACKENDS[name].attend(call)
            errors[name] = float((attended.double() - expected).abs().max())
    return errors


def _split(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Split rows ``(R, C)`` among heads: the same ``(H, R, D)`` for queries and for keys."""
    heads = rows.unflatten(-1, (HEADS, -1)).transpose(0, 1)
    return heads, heads
