"""The library's layers give what the plugin's give, step by step as well, and of its parts."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from fairseq_posenc import registry
from fairseq_posenc.api import (
    Cache,
    CrossAttention,
    LayerPositions,
    PositionEncoding,
    SelfAttention,
    StackPositions,
)
from fairseq_posenc.errors import UserError
from fairseq_posenc.transformer.attention import PositionalAttention
from fairseq_posenc.transformer.forward_context import set_context
from tests.helpers.formulas import awake, padding_of
from tests.helpers.products import product_of
from tests.helpers.tiny_models import COMPOSITIONS, needs_causal
from tests.helpers.uncompiled_flex import attend_uncompiled

SPECS = [*registry.names(), *COMPOSITIONS, "m4m(per_head=true)"]


def both(spec: str, direction: str = "both"):
    """Return the library's layer with its stack, and the plugin's attention with its weights."""
    causal = needs_causal(spec) or direction == "lr"
    positions = awake(StackPositions(spec, 16, 2, max_positions=12, causal=causal))
    ours = SelfAttention(positions, direction=direction if not causal else None)
    awake(ours.encodings)
    stack = (positions.spec, positions.dims)
    encodings = SelfAttention(positions).encodings
    theirs = PositionalAttention(16, 2, encodings, ours.direction, stack=stack)
    theirs.load_state_dict(ours.state_dict())
    return positions.eval(), ours.eval(), theirs.eval()


@pytest.mark.parametrize(("spec", "direction"), product_of(SPECS, ["both", "lr", "rl"]))
def test_a_layer_equals_the_plugins_with_the_same_weights(spec, direction):
    if direction == "rl" and needs_causal(spec):
        return  # a causal stack has one direction
    positions, ours, theirs = both(spec, direction)
    embeddings = torch.randn(3, 7, 16)
    padding = padding_of(7, 0, -2, 2)
    x, shared = positions(embeddings, padding)
    found, weights = ours(x, shared, need_weights=True)
    with set_context(shared):
        expected, _ = theirs(x.transpose(0, 1), None, None, key_padding_mask=padding)
    torch.testing.assert_close(found, expected.transpose(0, 1), rtol=1e-6, atol=1e-6)
    assert weights.shape == (3, 2, 7, 7)
    without, nothing = ours(x, shared)
    torch.testing.assert_close(without, found, rtol=1e-5, atol=1e-5)
    assert nothing is None


@pytest.mark.parametrize(
    ("spec", "length"),
    [("deberta_v2(buckets=8)", 8), ("deberta_v2", 256), ("t5(num_buckets=32,max_distance=12)", 16)],
)
def test_as_many_buckets_as_distances(spec, length):
    """Some buckets have no distance, and others several: padding changes neither."""
    positions = awake(StackPositions(spec, 16, 2, max_positions=length))
    layer = SelfAttention(positions)
    awake(layer.encodings)
    x = torch.randn(1, length, 16)
    padded = torch.cat([x, torch.randn(1, 3, 16)], 1)
    padding = torch.arange(length + 3)[None] >= length
    found = layer(*positions(x))[0]
    again = layer(*positions(padded, padding))[0][:, :length]
    torch.testing.assert_close(again, found, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("spec", [s for s in SPECS if s != "sentence_learned+m4"])
def test_step_by_step_equals_the_full_pass(spec):
    positions, ours, _ = both(spec, "lr")
    embeddings = torch.randn(2, 9, 16)
    padding = padding_of(9, 0, 2)
    full = ours(*positions(embeddings, padding))[0]
    cache = Cache()
    for step in [slice(0, 3), *(slice(i, i + 1) for i in range(3, 8)), slice(8, 9)]:
        x, shared = positions(embeddings[:, step], padding[:, : step.stop], past=step.start)
        found = ours(x, shared, cache)[0]
        real = ~padding[:, step]
        torch.testing.assert_close(found[real], full[:, step][real], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("first", [1, 20])
@torch.no_grad()
def test_a_step_projects_only_rows_that_no_earlier_step_did(first):
    """At 40 tokens deberta_v2 has rows for single distances and for buckets."""
    positions = awake(StackPositions("deberta_v2(buckets=8)", 16, 2, 40, causal=True)).eval()
    layer = awake(SelfAttention(positions)).eval()
    x, cache, projected = torch.randn(2, 40, 16), Cache(), []
    full = layer(*positions(x))[0]
    layer.k_proj.register_forward_pre_hook(lambda _, inputs: projected.append(inputs[0]))
    for past, end in [(0, first), *((n, n + 1) for n in range(first, 40))]:
        found = layer(*positions(x[:, past:end], past=past), cache)[0]
        torch.testing.assert_close(found, full[:, past:end], rtol=1e-5, atol=1e-5)
    assert sum(len(rows) for rows in projected if rows.dim() == 2) <= 2 * 8  # a row a bucket


@pytest.mark.parametrize("spec", ["rope+alibi", "fox", "m4m+window(size=3)"])
def test_a_cache_selects_rows_as_beam_search_does_in_float64(spec):
    positions, layer = (part.double() for part in both(spec, "lr")[:2])
    embeddings, rows = torch.randn(3, 6, 16).double(), torch.tensor([2, 2, 0, 1])
    full = layer(*positions(embeddings[rows]))[0]
    cache = Cache()
    layer(*positions(embeddings[:, :4]), cache)
    cache.reorder(rows)
    for i in (4, 5):
        step = layer(*positions(embeddings[rows, i : i + 1], past=i), cache)[0]
        torch.testing.assert_close(step[:, 0], full[:, i], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("spec", ["none", "rope+shaw", "learned+m4m", "t5", "tupe", "deberta_v2"])
@pytest.mark.parametrize("backend", ["auto", "blocked", "sdpa", "reference"])
def test_every_backend_attends_alike(spec, backend):
    """Also with keys of earlier steps, a direction, and padding on either side."""
    encoding = awake(PositionEncoding(spec, 16, 2, max_positions=64))
    # In the order in which a projection of (batch, length, embed_dim) leaves them in memory.
    query, key, value = (torch.randn(2, n, 2, 8).transpose(1, 2) for n in (50, 60, 60))
    padding = padding_of(60, -4, 4)

    def attended(backend: str) -> torch.Tensor:
        return encoding.attend(query, key, value, padding, direction="lr", backend=backend)

    expected = attended("reference")
    if backend == "sdpa" and spec not in ("none", "t5", "tupe"):
        with pytest.raises(UserError, match="sdpa cannot compute this"):
            attended(backend)
        return
    torch.testing.assert_close(attended(backend), expected, rtol=1e-4, atol=1e-5)


def test_dropout_drops_and_keeps_the_mean():
    encoding = PositionEncoding("alibi", 16, 2, causal=True)
    zeros, ones = torch.zeros(1, 2, 100, 8), torch.ones(1, 2, 100, 8)
    dropped = encoding.attend(zeros, zeros, ones, dropout=0.5)
    assert not torch.allclose(dropped, ones)
    assert dropped.mean() == pytest.approx(1.0, abs=0.1)


def test_shared_encodings_are_one_for_all_layers():
    positions = StackPositions("learned+t5+m4m", 16, 2)
    assert [*positions.state_dict()] == ["input.learned.table.weight", "shared.t5.table"]
    first, second = (SelfAttention(positions).encodings for _ in range(2))
    assert [*first.state_dict()] == ["m4m.table.weight"]
    assert first["m4m"].table.weight is not second["m4m"].table.weight


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"direction": "up"}, "choose one of both, lr, rl"),
        ({"backend": "sdpa"}, "sdpa cannot compute this"),
        ({"backend": "fast"}, "unknown backend 'fast'; known: auto, triton, flex, sdpa"),
    ],
)
def test_a_layer_that_cannot_be_is_refused(options, message):
    positions = StackPositions("none,m4m", 16, 2)
    SelfAttention(positions, backend="sdpa")  # of layer 0, which has no m4m
    with pytest.raises(UserError, match=message):
        SelfAttention(positions, layer=1, **options)
    with pytest.raises(UserError, match="in a causal stack it is lr"):
        SelfAttention(StackPositions("m4m", 16, 2, causal=True), direction="rl")


@pytest.mark.parametrize("past", [0, 2])
def test_positions_that_do_not_know_of_the_cache_are_refused(past):
    """Rotations would be those of other positions, without any other sign of it."""
    positions = StackPositions("rope", 16, 2, causal=True)
    layer, cache = SelfAttention(positions), Cache()
    layer(*positions(torch.randn(1, 3, 16)), cache)
    with pytest.raises(UserError, match=rf"3 tokens are in the cache .* for past={past} and 1 new"):
        layer(*positions(torch.randn(1, 1, 16), past=past), cache)
    assert cache.kept.key.size(2) == 3
    layer(*positions(torch.randn(1, 1, 16), past=3), cache)
    with pytest.raises(UserError, match="0 tokens are in the cache"):
        layer(*positions(torch.randn(1, 1, 16), past=3))


def test_position_ids_beyond_a_table_are_refused():
    ids = torch.arange(8, 13)[None]
    with pytest.raises(UserError, match="position 12 is beyond the 12 positions"):
        StackPositions("learned", 16, 2, max_positions=12)(torch.randn(2, 5, 16), position_ids=ids)


CROSS = "rope(cross_attention=true)"
OF_PARTS = ["none", "rope", "alibi", "t5", "tupe(reset=true)", "kerple", "rope+t5"]
OF_PARTS += ["raffel", "raffel,none", "fire"]


@pytest.mark.parametrize(("spec", "padded"), product_of(OF_PARTS, [False, True]))
def test_attention_made_of_the_parts_is_the_layers(spec, padded):
    causal = needs_causal(spec)
    positions = awake(StackPositions(spec, 16, 2, max_positions=12, causal=causal)).eval()
    layer, whole = LayerPositions(positions), SelfAttention(positions, bias=False).eval()
    awake(layer.encodings)
    whole.encodings.load_state_dict(layer.encodings.state_dict())
    for projection in (whole.q_proj, whole.k_proj, whole.v_proj, whole.out_proj):
        torch.nn.init.eye_(projection.weight)
    embeddings, padding = torch.randn(2, 7, 16), padding_of(7, 2 * padded, 0)
    x, shared = positions(embeddings, padding)
    value = x.unflatten(-1, (2, 8)).transpose(1, 2)
    query, key = layer.rotate(value, value, shared)
    hidden = layer.hidden(shared, "lr" if causal else "both")
    hidden = torch.zeros(1, 1, 7, 7, dtype=torch.bool) if hidden is None else hidden
    hidden = hidden.expand(2, 1, 7, 7) & ~torch.eye(7, dtype=torch.bool)  # no row of nothing
    expected, real = whole(x, shared)[0], ~padding
    if spec != "m2":  # which multiplies the scores
        bias = layer.bias(shared)
        mask = torch.zeros(1) if bias is None else bias
        mask = mask.masked_fill(hidden, -torch.inf)
        found = F.scaled_dot_product_attention(query, key, value, mask, scale=layer.scale)
        torch.testing.assert_close(found.transpose(1, 2).flatten(2)[real], expected[real])
    modified = layer.score_mod(shared)

    def masked(score, b, h, q, k):
        score = modified(score, b, h, q, k)
        return torch.where(hidden[b, torch.zeros_like(h), q, k], -torch.inf, score)

    found = attend_uncompiled(query, key, value, score_mod=masked, scale=layer.scale)
    torch.testing.assert_close(found.transpose(1, 2).flatten(2)[real], expected[real])


def test_a_bias_by_position_ids_is_float32():
    positions = StackPositions("raffel", 16, 2).bfloat16()
    ids = torch.tensor([[0, 3, 1]])
    _, shared = positions(torch.randn(1, 3, 16, dtype=torch.bfloat16), position_ids=ids)
    assert LayerPositions(positions).bfloat16().bias(shared).dtype == torch.float32


def test_parts_that_are_not_enough_are_refused():
    for spec in ("m4m", "shaw_values", "transformer_xl", "rope+ssmax", "rope+softcap"):
        with pytest.raises(UserError, match="use SelfAttention"):
            LayerPositions(StackPositions(spec, 16, 2))
    for spec in ("fox", "pope", "cope"):
        with pytest.raises(UserError, match="use SelfAttention"):
            LayerPositions(StackPositions(spec, 16, 2, causal=True))
    positions = StackPositions("m2", 16, 2)
    with pytest.raises(UserError, match="use score_mod"):
        LayerPositions(positions).bias(positions(torch.randn(1, 3, 16))[1])


def repeated(layer: SelfAttention, groups: int) -> dict[str, torch.Tensor]:
    """Return the weights of a layer with grouped queries as those of one whose heads are all."""
    weights = dict(layer.state_dict())
    for name in ("k_proj.weight", "k_proj.bias", "v_proj.weight", "v_proj.bias"):
        heads = weights[name].unflatten(0, (-1, layer.head_dim))
        weights[name] = heads.repeat_interleave(groups, 0).flatten(0, 1)
    return weights


@pytest.mark.parametrize("spec", [s for s in SPECS if s != "sentence_learned+m4"])
def test_grouped_queries_equal_repeated_heads(spec):
    """Also step by step; heads have a width of their own; the cache holds the fewer heads."""
    positions = awake(StackPositions(spec, 24, 4, 12, causal=True, head_dim=8)).eval()
    few = awake(SelfAttention(positions, num_key_value_heads=2)).eval()
    all_heads = SelfAttention(positions).eval()
    all_heads.load_state_dict(repeated(few, 2))
    embeddings = torch.randn(2, 9, 24)
    found = few(*positions(embeddings))[0]
    torch.testing.assert_close(found, all_heads(*positions(embeddings))[0], rtol=1e-5, atol=1e-5)
    cache = Cache()
    for i in range(9):
        step = few(*positions(embeddings[:, i : i + 1], past=i), cache)[0]
        torch.testing.assert_close(step[:, 0], found[:, i], rtol=1e-5, atol=1e-4)
    assert cache.kept.key.shape == (2, 2, 9, 16 if "pope" in spec else 8)


@pytest.mark.parametrize("spec", ["none", "m4m", "rope", CROSS, f"{CROSS},none"])
@pytest.mark.parametrize("kv_heads", [None, 1])
def test_attention_to_a_source(spec, kv_heads):
    """Against the equation; a generation computes the source's keys once."""
    positions = StackPositions(spec, 16, 2, 12, causal=True)
    layer = CrossAttention(positions, source_dim=6, num_key_value_heads=kv_heads).eval()
    x, source = torch.randn(3, 5, 16), torch.randn(3, 7, 6)
    padding = padding_of(7, 0, -2, 7)
    _, shared = positions(x)
    found, weights = layer(x, source, shared, padding, need_weights=True)

    def heads(projected: torch.Tensor) -> torch.Tensor:
        return projected.unflatten(-1, (-1, 8)).transpose(1, 2).double()

    query, key = heads(layer.q_proj(x)), heads(layer.k_proj(source))
    value = heads(layer.v_proj(source))
    if "cross" in spec:
        query, key = (
            positions.shared.rotation(torch.arange(n)[None]).rotate_queries(y)
            for n, y in ((5, query), (7, key))
        )
    scores = (query @ key.transpose(-1, -2)) / 8**0.5
    expected = scores.masked_fill(padding[:, None, None], -torch.inf).softmax(-1).nan_to_num(0.0)
    torch.testing.assert_close(weights, expected.float().expand(3, 2, 5, 7))
    attended = (expected @ value).transpose(1, 2).flatten(2).float()
    torch.testing.assert_close(found, layer.out_proj(attended), rtol=1e-5, atol=1e-5)
    cache = Cache()
    for i in range(5):
        _, shared = positions(x[:, i : i + 1], past=i)
        step = layer(x[:, i : i + 1], source if i == 0 else None, shared, padding, cache)[0]
        torch.testing.assert_close(step[:, 0], found[:, i], rtol=1e-5, atol=1e-5)


def test_heads_and_sources_that_do_not_fit_are_refused():
    with pytest.raises(UserError, match="the width of a head must be at least 1, not -2"):
        StackPositions("rope", 16, 4, head_dim=-2)
