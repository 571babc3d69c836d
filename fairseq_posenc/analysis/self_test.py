"""Compares a tiny forward pass of an encoding on each backend with the reference in float64.

``fairseq-posenc doctor`` shows the largest absolute differences, here called errors.
"""

import math

import torch
from torch import Tensor, nn

from fairseq_posenc import specs
from fairseq_posenc.assembly import build_encodings
from fairseq_posenc.backends import BACKENDS
from fairseq_posenc.backends.base import AttentionCall
from fairseq_posenc.backends.mask import Mask
from fairseq_posenc.backends.reference import attend as attend_by_reference
from fairseq_posenc.encodings.base import Dims, Encodings
from fairseq_posenc.encodings.terms import Terms
from fairseq_posenc.positions import Positions

DIMS = Dims(embed_dim=16, num_heads=2, max_positions=8)
LENGTH = 6
LEAST_CHANGE = 1e-2  # a rotation must change a dot product by this; else it does nothing


@torch.no_grad()
def measure_errors(spec: str, backends: list[str], causal: bool) -> dict[str, float]:
    """Measure the largest error of the input, the rotation, and each backend that accepts it."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    encodings = build_encodings(specs.parse(spec), DIMS._replace(causal=causal)).to(device)
    for parameter in encodings.parameters():
        nn.init.normal_(parameter)  # initial values can be too small to show a mistake
    positions = Positions.from_padding(torch.zeros(1, LENGTH, dtype=torch.bool, device=device))
    shape = (1, DIMS.num_heads, LENGTH, DIMS.head_dim)
    query, key, value = (torch.randn(shape, device=device) for _ in range(3))
    errors = {"the input": _measure_input_error(encodings, positions)}
    errors["rotation"] = _measure_rotation_error(encodings, query, key, positions.ids)
    query, key = _rotate(encodings, query, key, positions.ids)
    terms = encodings.terms(positions.span(), positions)
    inputs = torch.randn(1, LENGTH, DIMS.embed_dim, device=device)
    terms = encodings.add_input_terms(terms, inputs, positions, DIMS.num_heads)
    mask = Mask(direction="lr" if causal else "both")  # lr: no key after the query
    call = AttentionCall(query, key, value, terms.unprojected(DIMS.num_heads), mask)
    expected = _attend_exactly(call, terms.expanded())  # with a row for each distance
    for name in backends:
        if not BACKENDS[name].refuses(call.terms, call.features):  # a reason, or empty
            attended, _ = BACKENDS[name].attend(call)
            errors[name] = float((attended.double().cpu() - expected).abs().max())
    return errors


def _measure_input_error(encodings: Encodings, positions: Positions) -> float:
    """Return 0 if the input vectors are finite and shaped as embeddings, else infinity."""
    shape = (1, LENGTH, DIMS.embed_dim)
    for encoding in encodings.as_list():
        vectors = encoding.embed(positions)
        if vectors is not None and not (vectors.shape == shape and vectors.isfinite().all()):
            return math.inf
    return 0.0


def _measure_rotation_error(encodings: Encodings, query: Tensor, key: Tensor, ids: Tensor) -> float:
    """Measure how the products of rotated queries and keys change if all positions shift by 5.

    With a correct rotation they depend on distances alone, and do not change. A rotation that does
    nothing would pass as well, so its error is infinity.
    """

    def multiply(shift: int) -> Tensor:
        q, k = (x.double().cpu() for x in _rotate(encodings, query, key, ids + shift))
        return q @ k.transpose(-1, -2)

    products = multiply(shift=0)
    unrotated = (query @ key.transpose(-1, -2)).double().cpu()
    rotates = any(encoding.acts_on == "rotation" for encoding in encodings.as_list())
    if rotates and (products - unrotated).abs().max() < LEAST_CHANGE:
        return math.inf
    return float((multiply(shift=5) - products).abs().max())


def _rotate(encodings: Encodings, query: Tensor, key: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate query and key at positions ``ids``."""
    rotation = encodings.rotation(ids)
    if rotation is None:
        return query, key
    return rotation.rotate_queries(query), rotation.rotate_keys(key)


def _attend_exactly(call: AttentionCall, terms: Terms) -> Tensor:
    """Compute a call with the reference backend in float64 on the CPU, ``(1, H, T, D)``."""

    # This repeats `Terms.unprojected` of the checked calls, so that a mistake there is an error.
    def split_heads(rows: Tensor) -> tuple[Tensor, Tensor]:
        heads = rows.unflatten(-1, (DIMS.num_heads, -1)).transpose(0, 1)  # [H, R, D]
        return heads, heads

    exact = terms.projected(split_heads).map(_to_float64)
    query, key, value = map(_to_float64, (call.query, call.key, call.value))
    attended, _ = attend_by_reference(AttentionCall(query, key, value, exact, call.mask))
    return attended


def _to_float64(x: Tensor) -> Tensor:
    return x.cpu().double() if x.is_floating_point() else x.cpu()
