"""The package's encodings and the oracles side by side: the same parameters, two ways to scores."""

from __future__ import annotations

from functools import partial

import torch

from fairseq_posenc import registry, specs
from fairseq_posenc.assembly import build_encodings
from fairseq_posenc.backends import reference
from fairseq_posenc.encodings.base import Dims, Encodings
from fairseq_posenc.encodings.rope_scaling import Scaling
from fairseq_posenc.mask import Mask
from fairseq_posenc.positions import Positions
from tests.helpers import oracles
from tests.helpers.tiny_models import needs_causal

DIMS = Dims(embed_dim=16, num_heads=2, max_positions=20)
PAD, EOS = 1, 2
# Angles and fixed biases are computed in float32 by contract, whatever the model's precision.
IN_FLOAT32 = {"rope", "lerope", "xpos", "pope", "transformer_xl", "sandwich", "alibi"}
# Inputs of a layer, for gates that depend on them.
INPUTS = torch.randn(
    256, DIMS.embed_dim, dtype=torch.float64, generator=torch.Generator().manual_seed(5)
)


def build(spec: str, dims: Dims) -> Encodings:
    return build_encodings(specs.name_modules(specs.parse(spec).items), dims)


def make(spec: str, dims: Dims = DIMS, dtype: torch.dtype = torch.float64):
    """Build encodings with parameters of order one, so that each of them matters."""
    dims = dims._replace(causal=dims.causal or needs_causal(spec))
    torch.randn(2, 4, 8)  # the published vectors were drawn after so many other numbers
    return awake(build(spec, dims).to(dtype))


def awake(built, of: str = ""):
    """Give position parameters weight, those with ``of`` in their names: they start near 0."""
    for name, parameter in built.named_parameters():
        if of in name:
            torch.nn.init.normal_(parameter, std=0.5)
        if name.endswith((".r1", ".r2")):  # rates are positive
            parameter.data.abs_().add_(0.1)
    return built


wake = partial(awake, of=".encodings.")


def padding_of(length: int, *rows: int) -> torch.Tensor:
    """Return a mask of padding: so many first tokens of each row or, if negative, last ones."""
    index = torch.arange(length)
    return torch.stack([index < n if n >= 0 else index >= length + n for n in rows])


def positions_of(tgt_len: int, src_len: int) -> Positions:
    return Positions.from_tokens(torch.full((1, src_len), 5), PAD, EOS, tgt_len)


def split_heads(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return (rows.unflatten(-1, (DIMS.num_heads, -1)).transpose(0, 1),) * 2


def rotated(built, query, key, ids):
    rotation = built.rotation(ids)
    return (
        (query, key)
        if rotation is None
        else (rotation.rotate_queries(query), rotation.rotate_keys(key))
    )


def our_scores(built, query, key, ids=None):
    """Return the scores of one sentence, ``(heads, tgt_len, src_len)``, of tokens at ``ids``."""
    tgt_len, src_len = query.size(1), key.size(1)
    index = torch.arange(src_len)[None] if ids is None else ids[None]
    rotated_query, _ = rotated(built, query[None], query[None], index[:, -tgt_len:])
    _, rotated_key = rotated(built, key[None], key[None], index)
    positions = positions_of(tgt_len, src_len)
    positions = positions if ids is None else positions.replace_ids(index)
    terms = built.terms(positions).projected(split_heads)  # as if a layer projected content rows
    terms |= built.input_terms(INPUTS[None, :src_len].to(query.dtype), positions)
    mask = Mask("lr" if any(each.causal_reason for each in built.as_list()) else "both")
    return reference.scores(rotated_query, rotated_key, terms, mask)[0]


def oracle_options(item, dims: Dims = DIMS) -> dict:
    """Return an item's options, and what the package takes from the model, for the oracles."""
    options = {"max_positions": dims.max_positions, "max_distance": dims.max_positions - 1}
    own = {key: str(x) if isinstance(x, Scaling) else x for key, x in item.options}
    if "max_distance" in registry.options(item.name):
        default = registry.options(item.name)["max_distance"].default
        options["max_distance"] = options["max_distance"] if default is None else default
    return {**options, **own}


def oracle_params(built, name: str) -> dict:
    params = {key.removesuffix(".weight"): x for key, x in built[name].named_parameters()}
    if vars(built[name]).get("key_projection", 0) is None:  # tied
        params["key_projection"] = params["query_projection"]
    if "table.reset" in params:  # to the oracles, two more rows
        params["table"] = torch.cat([params["table"], params.pop("table.reset")], dim=1)
    return params


def their_scores(built, spec: str, query, key, inputs=INPUTS, **projections):
    """Compute the oracles for the same parameters, shape as :func:`our_scores`.

    Terms of several encodings are summed: each one's scores less the content that all share.
    ``inputs`` of the layer, one row a key, are what gates look at.
    """
    tgt_len, src_len = query.size(1), key.size(1)
    parsed = specs.parse(spec).items
    for item in parsed:
        if registry.get(item.name).acts_on == "rotation" and item.name not in oracles.SCORES:
            rotate = getattr(oracles, item.name)
            options = {**oracle_options(item), **oracle_params(built, item.name)}
            query = rotate(query, list(range(src_len - tgt_len, src_len)), options)
            key = rotate(key, list(range(src_len)), {**options, "keys": True})
    plain = oracles.none(query, key, {}, {})
    scored = [item for item in parsed if item.name in oracles.SCORES and item.name != "none"]
    total = torch.zeros_like(plain)
    for item in scored:
        params = oracle_params(built, item.name)
        options = {**oracle_options(item), "inputs": inputs[:src_len], **projections}
        total = total + oracles.SCORES[item.name](query, key, params, options)
    return total - plain * (len(scored) - 1)
