"""What the library is given is looked at: shapes, types and fit, each mistake in one line."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from fairseq_posenc import registry
from fairseq_posenc.api import (
    Cache,
    CrossAttention,
    LayerPositions,
    PositionEncoding,
    SelfAttention,
    StackPositions,
)
from fairseq_posenc.backends import attend
from fairseq_posenc.backends.base import AttentionCall
from fairseq_posenc.encodings.terms import Terms
from fairseq_posenc.errors import UserError
from tests.helpers.formulas import awake
from tests.helpers.tiny_models import COMPOSITIONS

X = torch.randn(2, 5, 16)
LATER = torch.randn(2, 1, 16)
BOOL = torch.zeros(2, 5, dtype=torch.bool)


def refuse(message: str, call: Callable[..., Any], *given: Any, **named: Any) -> None:
    """Assert that a call is refused in a line, in which a pattern is found."""
    with pytest.raises(UserError, match=message) as printed:
        call(*given, **named)
    assert "\n" not in str(printed.value)


def stack(spec: str = "rope", **sizes: int) -> StackPositions:
    return StackPositions(spec, 16, 2, causal=True, **sizes)


MASKS = {
    "one column": (BOOL[:, :1], r"\(2, 1\) must be \(2, 5\)"),
    "one row": (BOOL[:1], r"\(1, 5\) must be \(2, 5\)"),
    "one dimension": (BOOL[0], r"\(5,\) must be \(2, 5\)"),
    "longer": (torch.zeros(2, 6, dtype=torch.bool), r"\(2, 6\) must be \(2, 5\)"),
    "four dimensions": (BOOL[:, None, None], r"\(2, 1, 1, 5\) must be \(2, 5\)"),
    "whole numbers": (torch.ones(2, 5).long(), "of bool, True for padding, not int64"),
    "bytes": (torch.ones(2, 5).byte(), "of bool, True for padding, not uint8"),
    "floats": (torch.zeros(2, 5), "of bool, True for padding, not float32"),
}


@pytest.mark.parametrize("case", MASKS)
def test_masks_of_another_shape_or_type_are_refused(case):
    mask, message = MASKS[case]
    positions = stack()
    refuse(f"key_padding_mask .*{message}", positions, X, mask)
    layer = CrossAttention(positions)
    refuse(f"source_padding_mask .*{message}", layer, X, X, positions(X)[1], mask)


@pytest.mark.parametrize("past", [1, 3])
def test_a_mask_of_the_new_tokens_alone_is_refused_in_a_cached_step(past):
    message = rf"key_padding_mask \(2, 1\) must be \(2, {past + 1}\): .* including those in a cache"
    refuse(message, stack(), LATER, BOOL[:, :1], past=past)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (torch.randn(5, 16), r"embeddings \(5, 16\) must be \(batch, length, 16\)"),
        (torch.randn(2, 5, 8), r"embeddings \(2, 5, 8\) must be \(batch, length, 16\)"),
        (torch.randn(2, 5, 4, 4), "must be"),
        (torch.ones(2, 5, 16).long(), "must be floating-point vectors, not int64"),
        (torch.randn(2, 0, 16), "give at least one token"),
    ],
)
def test_embeddings_that_do_not_fit_are_refused(given, message):
    refuse(message, stack(), given)


@pytest.mark.parametrize("spec", [*registry.names(), *COMPOSITIONS])
def test_an_empty_batch_gives_an_empty_result(spec):
    for length in (3, 60):
        positions = stack(spec, max_positions=64)
        x = torch.randn(0, length, 16)
        assert SelfAttention(positions)(*positions(x))[0].shape == x.shape


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.tensor([[0, 1, -1, 2, 3]]), "-1 is below 0"),
        (torch.ones(1, 5, dtype=torch.bool), "must be whole numbers .*, not bool"),
        (torch.arange(5), r"\(5,\) must be \(2 or 1, 5\)"),
        (torch.arange(5).expand(3, -1), r"\(3, 5\) must be \(2 or 1, 5\)"),
    ],
)
@pytest.mark.parametrize("spec", ["rope", "learned", "sinusoidal", "t5"])
def test_position_ids_that_mean_nothing_are_refused(spec, ids, message):
    refuse(message, stack(spec), X, position_ids=ids)


@pytest.mark.parametrize("ids", [torch.zeros(2, 5), torch.zeros(1, 5).long(), torch.arange(5)])
def test_document_ids_that_do_not_fit_are_refused(ids):
    refuse("document_ids", stack("rope+documents"), X, document_ids=ids)


@pytest.mark.parametrize(
    ("spec", "ids"),
    [
        ("rope+chunk(size=4)", [[2, 3, 4, 5, 9, 10, 11, 12], [0, 1, 2, 3, 4, 5, 6, 7]]),
        ("learned+chunk(size=3)", [[2, 3, 4, 5, 9, 10, 11, 12], [0, 1, 2, 3, 4, 5, 6, 7]]),
        ("rope+chunk(size=4)", [[0, 1, 2, 0, 1, 2]]),  # those that restart keep their chunk's keys
    ],
)
def test_position_ids_place_cached_tokens_in_their_chunks(spec, ids):
    positions = awake(stack(spec, max_positions=24)).eval()
    layer = awake(SelfAttention(positions)).eval()
    ids = torch.tensor(ids)
    x = torch.randn(*ids.shape, 16)
    full = layer(*positions(x, position_ids=ids))[0]
    cache = Cache()
    for i in range(ids.size(1)):
        given = {"past": i, "position_ids": ids[:, : i + 1]}
        step = layer(*positions(x[:, i : i + 1], **given), cache)[0]
        torch.testing.assert_close(step[:, 0], full[:, i], rtol=1e-5, atol=1e-5)
    with pytest.raises(UserError, match=r"chunk.* also needs those of the earlier tokens"):
        positions(x[:, :1], past=3, position_ids=ids[:, 3:4])


SPECS = [*registry.names(), *COMPOSITIONS, "m4m(max_distance=4)", "rope+window(size=4)"]


def test_a_layer_refuses_what_another_stack_computed():
    stacks = {spec: stack(spec, max_positions=12) for spec in SPECS}
    layers = {spec: SelfAttention(positions) for spec, positions in stacks.items()}
    computed = {spec: positions(X)[1] for spec, positions in stacks.items()}
    for ours, theirs in itertools.permutations(SPECS, 2):
        refuse("the positions of another stack", layers[ours], X, computed[theirs])
    with pytest.raises(UserError, match="the positions of another stack"):
        CrossAttention(stacks["rope"])(X, X, computed["alibi"])
    refuse("the positions of another stack", LayerPositions(stacks["rope"]).bias, computed["alibi"])


@pytest.mark.parametrize("sizes", [{"max_positions": 24}, {"head_dim": 4}])
def test_a_layer_refuses_the_state_of_other_sizes(sizes):
    with pytest.raises(UserError, match="the positions of another stack"):
        SelfAttention(stack("m4m"))(X, stack("m4m", **sizes)(X)[1])


@pytest.mark.parametrize(
    "mistaken", [None, (), BOOL, Cache(), stack(), stack()(X)], ids=lambda x: type(x).__name__
)
def test_shared_is_the_second_result_of_the_positions(mistaken):
    positions, name = stack(), type(mistaken).__name__
    message = f"`shared` must be the second result of the stack's positions, not {name}: "
    refuse(re.escape(message), SelfAttention(positions), X, mistaken)
    refuse(re.escape(message), CrossAttention(positions), X, X, mistaken)
    for part in (LayerPositions(positions).bias, LayerPositions(positions).score_mod):
        refuse(re.escape(message), part, mistaken)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.randn(2, 5, 8), r"x \(2, 5, 8\) must be \(batch, length, 16\)"),
        (torch.randn(5, 16), r"x \(5, 16\) must be \(batch, length, 16\)"),
        (torch.ones(2, 5, 16).long(), "x must be floating-point vectors, not int64"),
        ([[0.0]], "x must be a tensor, not list"),
    ],
)
def test_the_input_of_a_layer_has_the_width_of_its_stack(x, message):
    positions = stack()
    shared = positions(X)[1]
    refuse(message, SelfAttention(positions), x, shared)
    refuse(message, CrossAttention(positions), x, X, shared)


@pytest.mark.parametrize("shape", [(2, 2, 4, 8), (2, 5, 2, 8), (2, 2, 5, 4), (2, 2, 5, 16)])
def test_queries_and_keys_of_another_shape_are_not_rotated(shape):
    positions = stack()
    layer, shared = LayerPositions(positions), positions(X)[1]
    fits, other = torch.randn(2, 2, 5, 8), torch.randn(shape)
    for name, pair in {"query": (other, fits), "key": (fits, other)}.items():
        message = f"{name} {shape} must be (batch, heads, 5, 8), of the new tokens"
        refuse(re.escape(message), layer.rotate, *pair, shared)


def test_a_layer_takes_one_cache():
    positions = stack()
    with pytest.raises(UserError, match="cache must be a Cache, one for each layer, not list"):
        SelfAttention(positions)(*positions(X), [Cache()])


@pytest.mark.parametrize("batch", [1, 3])
def test_a_layer_refuses_another_batch(batch):
    positions = stack()
    shared, x = positions(X)[1], torch.randn(batch, 5, 16)
    refuse("computed for a batch of 2", SelfAttention(positions), x, shared)
    refuse("computed for a batch of 2", CrossAttention(positions), x, x, shared)


def test_a_cache_of_another_batch_is_refused():
    positions = stack()
    layer, cache = SelfAttention(positions), Cache()
    layer(*positions(X), cache)
    with pytest.raises(UserError, match=r"batch, heads, keys and width \(2, .* need \(3, "):
        layer(*positions(torch.randn(3, 1, 16), past=5), cache)


@pytest.mark.parametrize("spec", ["none", "rope(cross_attention=true)"])
def test_a_source_is_given_once_in_a_generation(spec):
    positions = stack(spec)
    layer = CrossAttention(positions).eval()
    source, cache = torch.randn(2, 7, 16), Cache()

    def step(past: int, source: Tensor | None, x: Tensor = LATER) -> Tensor:
        attended: Tensor = layer(x, source, positions(x, past=past)[1], None, cache)[0]
        return attended

    first = step(0, source)
    torch.testing.assert_close(step(0, None), first)
    refuse("then source=None", step, 1, source)
    refuse("x has a batch size of 3, but its source 2", step, 1, None, torch.randn(3, 1, 16))
    order = torch.tensor([1, 0])  # as a beam search reorders both
    cache.reorder(order)
    torch.testing.assert_close(step(0, None, LATER[order]), first[order])
    cache = Cache()
    refuse("pass the encoder's output as source", step, 0, None)


@pytest.mark.parametrize("dropout", [1.5, -0.5, 1.0, float("nan")])
def test_dropout_that_is_not_a_probability_is_refused(dropout):
    for build in (SelfAttention, CrossAttention):
        refuse("must be at least 0 and below 1", build, stack(), dropout=dropout)
    qkv = torch.randn(3, 1, 2, 5, 8)
    encoding = PositionEncoding("t5", 16, 2)
    refuse("must be at least 0 and below 1", encoding.attend, *qkv, dropout=dropout)
    refuse("must be at least 0 and below 1", attend, AttentionCall(*qkv, Terms(), dropout=dropout))


@pytest.mark.parametrize("heads", [0, -1, 3])
def test_key_value_heads_that_do_not_divide_are_refused(heads):
    for build in (SelfAttention, CrossAttention):
        with pytest.raises(UserError, match=f"num_key_value_heads={heads} must divide"):
            build(stack(), num_key_value_heads=heads)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("rope(scaling=longrope:4:short=1/1/1/1:long=2/2/2/2:length=1)", "a trained length of 1"),
        ("rope(scaling=llama3:4:low=8:high=2)", "low=8 must be below high=2"),
        ("rope(scaling=llama3:4:low=4:high=4)", "low=4 must be below high=4"),
        ("rope(scaling=yarn:4:beta_fast=1:beta_slow=32)", "beta_fast=1 must be at least beta_slow"),
        ("xpos(scaling=yarn:4:beta_fast=1:beta_slow=32)", "xpos.* beta_fast=1 must be at least"),
    ],
)
def test_scalings_without_a_meaning_are_refused(spec, message):
    refuse(message, stack, spec)


def test_scalings_go_by_the_length_in_training():
    sizes, ids = {"max_positions": 64}, torch.arange(64)[None]
    ours = stack("rope(scaling=yarn:4)", **sizes, pretrained_length=16).shared.rotation(ids)
    theirs = stack("rope(scaling=yarn:4:length=16)", **sizes).shared.rotation(ids)
    assert torch.equal(ours.phases, theirs.phases)


@pytest.mark.parametrize("spec", [name for name in registry.names() if name != "none"])
def test_a_model_of_one_position_works_or_says_why_not(spec):
    try:
        positions = stack(spec, max_positions=1)
    except UserError as refused:
        assert "a model of one position has no distances" in str(refused)  # noqa: PT017
        return
    assert SelfAttention(positions)(*positions(X[:, :1]))[0].isfinite().all()


@pytest.mark.parametrize(
    ("dtype", "length", "fits"),
    [
        *((torch.float16, 512, True), (torch.float16, 3500, True), (torch.float16, 4000, False)),
        *((torch.bfloat16, 30_000, True), (torch.float32, 30_000, True)),
        *((torch.bfloat16, 40_000, False), (torch.float32, 40_000, False)),
    ],
)
def test_xpos_scores_are_right_as_far_as_types_hold_them(dtype, length, fits):
    """The last queries and keys: their score is that of the first ones, or it is refused."""
    encoding = stack("xpos").shared.as_list()[0]
    torch.manual_seed(0)
    query, key = torch.randn(2, 1, 1, 4, 8).to(dtype)
    ids = torch.arange(length - 4, length)[None]
    if not fits:
        with pytest.raises(UserError, match=r"xpos: at these positions factors reach 2\^"):
            encoding.rotation(ids).rotate_queries(query)
        return

    # A GPU is not waited for to read the positions of a full pass, which are taken to count from 0.
    counted = torch.arange(length)[None]
    unread = encoding.rotation(counted.to("meta")).decay_bits
    assert unread == encoding.rotation(counted).decay_bits > 0

    def score(ids: Tensor) -> Tensor:
        rotation = encoding.rotation(ids)
        q, k = rotation.rotate_queries(query), rotation.rotate_keys(key)
        return (q.float() @ k.float().transpose(-1, -2)).tril()

    near = score(torch.arange(4)[None])
    allowed = {torch.float16: 2e-2, torch.bfloat16: 0.15, torch.float32: 2e-2}[dtype]
    torch.testing.assert_close(score(ids), near, rtol=0, atol=allowed)


DIFFERING = ["rope,none", "rope+window(size=3),none", "rope+alibi+chunk(size=4),alibi"]


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("spec", DIFFERING)
def test_parts_of_layers_that_differ_are_those_of_their_kind(spec, layer):
    positions = stack(spec, max_positions=12)
    attention, parts = SelfAttention(positions, layer=layer), LayerPositions(positions, layer=layer)
    x, shared = positions(torch.randn(2, 9, 16))
    expected = attention(x, shared)[0]
    query, key, value = attention.project(x)
    query, key = parts.rotate(query, key, shared)
    bias = parts.bias(shared)
    hidden = parts.hidden(shared, "lr")
    bias = torch.zeros(1, 1, 9, 9) if bias is None else bias
    bias = bias.masked_fill(hidden, -torch.inf)
    attended = scaled_dot_product_attention(query, key, value, bias, scale=parts.scale)
    torch.testing.assert_close(attention.project_output(attended), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("spec", ["rope+documents", "m4m+documents", "learned+documents"])
@pytest.mark.parametrize("causal", [True, False])
def test_a_document_that_begins_with_padding_is_one_of_its_own(spec, causal):
    positions = awake(StackPositions(spec, 16, 2, max_positions=12, causal=causal)).eval()
    layer = awake(SelfAttention(positions)).eval()
    x, documents = torch.randn(1, 6, 16), torch.tensor([[1, 1, 1, 2, 2, 2]])
    padding = torch.tensor([[False, False, False, True, False, False]])
    both = layer(*positions(x, padding, document_ids=documents))[0]
    for part in (slice(0, 3), slice(4, 6)):
        alone = layer(*positions(x[:, part], document_ids=documents[:, part]))[0]
        torch.testing.assert_close(both[:, part], alone, rtol=1e-5, atol=1e-5)


def test_padding_on_the_left_of_a_source_shifts_no_position():
    positions = stack("rope(cross_attention=true)")
    layer, x = CrossAttention(positions), torch.randn(1, 6, 16)
    source, shared = torch.randn(1, 5, 16), positions(x)[1]
    refuse(r"x \(1, 6, 16\) must be \(1, 1, 16\)", layer, x, source, positions(x[:, :1])[1])
    padded = layer(x, source, shared, torch.tensor([[True, True, False, False, False]]))[0]
    torch.testing.assert_close(padded, layer(x, source[:, 2:], shared)[0], rtol=1e-5, atol=1e-5)


def test_caches_of_other_layers_are_refused():
    positions = stack("rope+window(size=2),rope")
    layers = [SelfAttention(positions, layer=n) for n in range(2)]
    cache = Cache()
    layers[0](*positions(X), cache)
    refuse("give each layer its own cache", layers[1], *positions(LATER, past=5), cache)
    plain, gated, cross = Cache(), Cache(), Cache()
    none, fox = stack("none"), stack("fox")
    SelfAttention(none)(*none(X), plain)
    SelfAttention(fox)(*fox(X), gated)
    CrossAttention(none)(X, X, none(X)[1], None, cross)
    refuse("a layer with other encodings", SelfAttention(fox), *fox(LATER, past=5), plain)
    refuse("a layer with other encodings", SelfAttention(none), *none(LATER, past=5), gated)
    refuse("the cache is not of a SelfAttention", SelfAttention(none), *none(LATER, past=5), cross)
    with pytest.raises(UserError, match="the cache is not of a CrossAttention"):
        CrossAttention(none)(X, None, none(X)[1], None, plain)
    grouped = SelfAttention(none, num_key_value_heads=1)
    refuse("give each layer its own cache", grouped, *none(LATER, past=5), plain)
    plain.kept = plain.kept._replace(key=plain.kept.key[:, :, :3])
    refuse("give each layer its own cache", SelfAttention(none), *none(LATER, past=5), plain)


def test_arguments_of_a_single_layer_are_looked_at():
    encoding, query = PositionEncoding("shaw_values", 16, 2), torch.randn(1, 2, 5, 8)
    for direction in ("LR", "up"):
        refuse("unknown direction", encoding.attend, query, query, query, direction=direction)
    for value in (query[:, :, :3], query.tile(2, 1), query[:, :1], query[0], query[..., 1:]):
        refuse(r"must be \(1, 2, 5, 8\) for key", encoding.attend, query, query, value)
    plain = PositionEncoding("none", 16, 2)  # whose values may be of any width
    refuse(r"must be \(1, 2, 5, 3\) for", plain.attend, query, query, query[:, :1, :, :3])
    refuse("must both be", encoding.scores, query[0], query)
    refuse("must both be", encoding.scores, query, query[0, 0, 0, 0])
    refuse("unknown backend 'foo'", encoding.attend, query, query, query, backend="foo")
    refuse("inputs", encoding.scores, query, query, inputs=torch.randn(1, 4, 16))
    refuse("reach=-1 must be a whole number", encoding.distance_curve, -1)
    narrow = PositionEncoding("deberta_v2", 32, 4, head_dim=4)
    refuse("do not fit 4 heads of width 4", narrow.distance_curve, 4)
    for value in (1e300, -1e300):
        refuse("the score must fit float32", stack, f"rope+sink(value={value})")
    assert stack(f"rope+sink(value={torch.finfo(torch.float32).max})")


def test_heads_of_a_width_of_their_own_need_not_divide_the_model():
    positions = StackPositions("deberta_v2", 30, 4, head_dim=8)
    x = torch.randn(2, 5, 30)
    assert SelfAttention(positions)(*positions(x))[0].shape == x.shape


@pytest.mark.parametrize("kind", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.uint16])
@pytest.mark.parametrize("spec", ["rope", "learned", "learned+randomized"])
def test_position_ids_may_be_of_any_whole_type(spec, kind):
    positions = awake(stack(spec, max_positions=12)).eval()
    ids = torch.tensor([[4, 5, 6, 7, 8]])
    expected = positions(X, position_ids=ids)[0]
    torch.testing.assert_close(positions(X, position_ids=ids.to(kind))[0], expected)


@pytest.mark.parametrize("module", [SelfAttention, CrossAttention, LayerPositions])
def test_layers_are_built_from_positions_and_a_number(module):
    refuse("positions must be a StackPositions, not str", module, "rope")
    for layer in (-1, 1.5, True):
        refuse(f"layer={layer!r} must be a whole number", module, stack("rope"), layer=layer)


def test_what_is_no_tensor_or_number_is_a_line():
    for given in ({"key_padding_mask": [[False] * 5] * 2}, {"position_ids": [[0, 1, 2, 3, 4]]}):
        refuse("must be a tensor, not list", stack(), X, **given)
    for past in (-1, 1.0, "3", None):
        refuse(f"past={past!r} must be a whole number of at least 0", stack(), LATER, past=past)


@pytest.mark.parametrize("spec", [*SPECS, "rope+chunk(size=4)", "alibi+documents"])
def test_padding_between_tokens_shifts_nothing_or_is_refused(spec):
    """As after a prompt that was padded on the right."""
    positions = awake(stack(spec, max_positions=12)).eval()
    layer = awake(SelfAttention(positions)).eval()
    padding = torch.tensor([[False, False, True, False, False]])
    document = torch.zeros_like(padding).long() if "documents" in spec else None
    try:
        apart = layer(*positions(X[:1], padding, document_ids=document))[0][~padding]
    except UserError as refused:
        assert "padding lies between tokens" in str(refused)  # noqa: PT017
        assert spec not in ("none", "rope", "learned", "sinusoidal", "fox", "cope", "fire")
        if len(positions.spec.layers) == 1:
            alone = PositionEncoding(spec, 16, 2, causal=True)
            refuse("padding lies between", alone.scores, *torch.randn(2, 1, 2, 5, 8), padding)
        return
    expected = layer(*positions(X[:1][~padding][None]))[0][0]
    torch.testing.assert_close(apart, expected, atol=1e-5, rtol=1e-5)
