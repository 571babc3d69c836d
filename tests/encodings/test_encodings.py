"""Properties of every registered encoding: a new file is tested the day it exists."""

from __future__ import annotations

import inspect
import math

import pytest
import torch

from fairseq_posenc import registry, specs
from fairseq_posenc.analysis import catalogue
from fairseq_posenc.api import PositionEncoding, SelfAttention, StackPositions
from fairseq_posenc.assembly import count_parameters, draft_terms
from fairseq_posenc.backends import reference
from fairseq_posenc.backends.base import AttentionCall
from fairseq_posenc.encodings.base import Dims, Encoding
from fairseq_posenc.encodings.relative_positions import M4
from fairseq_posenc.encodings.runs import Runs
from fairseq_posenc.encodings.term import ByDistance, NumbersByPair, ScaleFactor
from fairseq_posenc.errors import UserError
from fairseq_posenc.mask import Mask
from fairseq_posenc.positions import Positions
from tests.helpers import oracles
from tests.helpers.commands import call
from tests.helpers.formulas import (
    DIMS,
    EOS,
    IN_FLOAT32,
    PAD,
    build,
    make,
    oracle_options,
    our_scores,
    positions_of,
    rotated,
    split_heads,
    their_scores,
)
from tests.helpers.products import product_of, some_of
from tests.helpers.terms import change_terms, terms_of
from tests.helpers.tiny_models import COMPOSITIONS, encoding_specs, make_model, needs_causal


@pytest.mark.parametrize(
    ("spec", "tgt_len", "src_len"),
    product_of(
        [*encoding_specs("scores", "rotation"), *COMPOSITIONS, "none"],
        [(5, 5), (1, 5), (2, 6), (8, 8), (17, 17)],
        times=2,
    ),
)
def test_scores_equal_the_formula(spec, tgt_len, src_len):
    built = make(spec)
    query = torch.randn(2, tgt_len, 8, dtype=torch.float64)
    key = torch.randn(2, src_len, 8, dtype=torch.float64)
    ours, theirs = our_scores(built, query, key), their_scores(built, spec, query, key)
    tolerance = 1e-5 if IN_FLOAT32 & {i.name for i in specs.parse(spec).items} else 1e-12
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("spec", [s for s in encoding_specs("scores") if "shaw_values" not in s])
def test_gradients_equal_those_of_the_formula(spec):
    built = make(spec)
    query = torch.randn(2, 4, 8, dtype=torch.float64, requires_grad=True)
    key = torch.randn(2, 4, 8, dtype=torch.float64, requires_grad=True)
    leaves = [query, key, *built.parameters()]
    weight = torch.randn(2, 4, 4, dtype=torch.float64)
    ours = torch.autograd.grad((our_scores(built, query, key) * weight).sum(), leaves)
    theirs = torch.autograd.grad((their_scores(built, spec, query, key) * weight).sum(), leaves)
    for our, their in zip(ours, theirs):
        torch.testing.assert_close(our, their, rtol=1e-5, atol=1e-6)
        assert their.abs().sum() > 0  # the comparison sees every parameter


@pytest.mark.parametrize("name", registry.names())
@pytest.mark.parametrize("positions", [7, 1100])
def test_parameter_count_has_a_closed_form(name, positions):
    dims = Dims(embed_dim=24, num_heads=3, max_positions=positions, causal=needs_causal(name))
    counted = sum(count_parameters(specs.parse(name), dims, 5).values())
    assert counted == oracles.parameter_count(name, m=5, n=positions, d=8, D=24, h=3)


@pytest.mark.parametrize("name", registry.names())
def test_documentation_has_every_section(name):
    assert all(catalogue.parse_page(name).values())


def test_a_docstring_without_a_section_is_described_without_it(monkeypatch, capsys):
    source = inspect.getsource(registry.get("rope"))
    cut = source.partition("    Source:")[0] + '    """\n'
    for text in (cut, source.replace("Source:", "Source:\n\n    Differs:")):
        monkeypatch.setattr(inspect, "getsource", lambda cls, text=text: text)
        described, _ = call(capsys, "describe", "rope")
        assert ("Equation " in described, "Source " in described) == (True, False)


@pytest.mark.parametrize("spec", encoding_specs("scores"))
def test_initial_parameters_are_small_and_not_zero(spec):
    encoding = build(spec, Dims(64, 2, 64, causal=needs_causal(spec)))
    for name, parameter in encoding.named_parameters():
        assert parameter.abs().mean() < 2 or name == "fox.gate.bias"  # keeps nearly all
        assert parameter.abs().sum() > 0 or name.endswith("bias") or name == "cope.table"


@pytest.mark.parametrize(
    ("spec", "name", "low", "high"),
    [
        *(("fire", f"hidden_{kind}", -1.0, 1.0) for kind in ("weight", "bias")),
        *(("fire", f"output_{kind}", -(32**-0.5), 32**-0.5) for kind in ("weight", "bias")),
        *(("kerple", "r1", 0.0, 2.0), ("kerple", "r2", 0.0, 1.0)),
        ("fox", "gate.weight", -0.1, 0.1),
        *(("m1", "table.weight", 1, 1), ("m2", "table.weight", 1, 1), ("m3", "table.weight", 1, 1)),
        *(("cope", "table", 0, 0), ("pope", "delta", 0, 0)),
    ],
)
def test_initial_parameters_are_spread_over_their_range(spec, name, low, high):
    parameter = build(spec, Dims(64, 16, 64, causal=True))[spec].get_parameter(name)
    assert low <= parameter.min() <= low + 0.4 * (high - low)
    assert high >= parameter.max() >= high - 0.4 * (high - low)


@pytest.mark.parametrize(
    ("spec", "dtype"), product_of(encoding_specs("rotation"), [torch.float16, torch.bfloat16])
)
def test_half_precision_leaves_angles_exact(spec, dtype):
    """Beyond position 2000 an angle in half precision would be off by a radian."""
    built = build(spec, Dims(16, 2, 4096, causal=needs_causal(spec)))
    query = torch.randn(1, 2, 3, 8, dtype=dtype)
    index = torch.arange(2001, 2004)[None]
    exact, _ = rotated(built, query.double(), query.double(), index)
    half, _ = rotated(built.to(dtype), query, query, index)
    assert half.dtype == dtype
    # One rounding of the input and one of the result: no error of an angle.
    torch.testing.assert_close(half.double(), exact, rtol=2 * torch.finfo(dtype).eps, atol=2e-3)


@pytest.mark.parametrize("scale", [1, 0.03])
@pytest.mark.parametrize("layout", ["interleaved", "half", "fairseq"])
def test_sinusoids_equal_the_formula(layout, scale):
    built = make(f"sinusoidal(layout={layout},scale={scale})")
    tokens = torch.tensor([[0, 7, 8, 9, 2], [PAD, PAD, 0, 7, 2]])
    ours = built["sinusoidal"].embed(Positions.from_tokens(tokens, PAD, EOS, 5))
    if layout == "interleaved":
        table = scale * oracles.sinusoidal(5, 16)
    elif layout == "half":
        table = scale * oracles.sinusoidal(5, 16).unflatten(1, (-1, 2)).transpose(1, 2).flatten(1)
    else:
        table = scale * oracles.sinusoidal_half(7, 16)[2:]  # fairseq counts from padding_idx + 1
    torch.testing.assert_close(ours[0].double(), table, rtol=0, atol=1e-6)
    torch.testing.assert_close(ours[1, 2:].double(), table[:3], rtol=0, atol=1e-6)


def test_the_first_token_of_every_sentence_stands_at_1():
    """``<s> a b c </s> d e </s>``, with padding on either side."""
    tokens = torch.tensor([[0, 5, 6, 7, EOS, 8, 9, EOS]])
    ours = Positions.from_tokens(tokens, PAD, EOS, 8).sentence_ids()
    assert ours.tolist() == [[0, 1, 2, 3, 4, 1, 2, 3]]
    padding = torch.full((1, 2), PAD)
    left = Positions.from_tokens(torch.cat([padding, tokens], 1), PAD, EOS, 10).sentence_ids()
    right = Positions.from_tokens(torch.cat([tokens, padding], 1), PAD, EOS, 10).sentence_ids()
    assert torch.equal(left[:, 2:], ours)
    assert torch.equal(right[:, :8], ours)
    assert right.max() < 8  # no row of the table beyond those of the block
    without_end = Positions.from_tokens(torch.full((1, 8), 5), PAD, EOS, 8)
    assert without_end.sentence_ids().tolist() == [list(range(8))]


def test_a_masked_end_ends_no_sentence():
    """Where its input is all that a model knows; the next end starts new positions."""
    tokens = torch.tensor([[0, 5, 30, 6, EOS, 7]])  # 30: the mask
    ours = Positions.from_tokens(tokens, PAD, EOS, 6).sentence_ids()
    assert ours.tolist() == [[0, 1, 2, 3, 4, 1]]


def test_sentence_positions_equal_the_formula():
    tokens = torch.tensor(
        [
            [0, 7, 8, EOS, 9, 9, EOS, 7, EOS, PAD],
            [PAD, PAD, 0, 7, EOS, 9, EOS, EOS, 7, 8],
            [EOS, 7, 8, 9, 9, EOS, 7, 7, 7, 7],
        ]
    )
    ours = Positions.from_tokens(tokens, PAD, EOS, 10).sentence_ids()
    theirs = oracles.sentence_positions(tokens, PAD, EOS)
    real = tokens.ne(PAD)
    assert torch.equal(ours[real], theirs[real])
    without = Positions.from_padding(tokens.eq(PAD), tgt_len=1)  # no tokens are needed
    assert torch.equal(without.padding, tokens.eq(PAD))
    assert torch.equal(without.ids, Positions.from_tokens(tokens, PAD, EOS, 10).ids)
    assert torch.equal(without.sentence_ids(), without.ids)
    assert without.tgt_len == 1


@pytest.mark.parametrize(
    "spec",
    some_of(
        [spec for spec in encoding_specs("scores", "rotation") if "(" not in spec],
        encoding_specs("scores", "rotation"),
    ),
)
def test_four_times_longer_than_trained(spec):
    if spec.startswith("tupe"):
        with pytest.raises(UserError, match="longer than the 20 positions of 'tupe"):
            our_scores(make(spec), *torch.randn(2, 2, 21, 8, dtype=torch.float64))
        return
    length = 4 * DIMS.max_positions
    query, key = torch.randn(2, 2, length, 8, dtype=torch.float64)
    scores = our_scores(make(spec), query, key)
    assert scores.shape == (2, length, length)
    assert scores.isfinite().all()


@pytest.mark.parametrize("name", ["learned", "sentence_learned"])
def test_longer_than_the_table_is_an_error_that_names_limit_and_option(name):
    tokens = torch.full((1, 21), 5)
    with pytest.raises(UserError, match=r"21 tokens is longer than the 20 .* raise max_positions"):
        make(name)[name].embed(Positions.from_tokens(tokens, PAD, EOS, 21))


@pytest.mark.parametrize(
    ("tgt_len", "src_len"), [(4, 4), (3, 10), (10, 10), (1, 10), (7, 8), (1, 1)]
)
@pytest.mark.parametrize("reset", [False, True])
def test_table_rows_are_clipped(tgt_len, src_len, reset):
    encoding = M4(Dims(6, 3, 5), per_head=True, reset=reset)
    encoding.reset_parameters()
    rows = encoding.terms(positions_of(tgt_len, src_len))[0]
    table, low, high = encoding.table, 1 - src_len, tgt_len - 1
    expected = [table.weight[:, max(-4, min(4, r)) + 4] for r in range(low, high + 1)]
    if reset:
        expected += [table.reset[:, 0], table.reset[:, 1]]
    torch.testing.assert_close(rows.expand(), torch.stack(expected, dim=1))
    assert rows.table.size(1) == max(min(high, 4) - max(low, -4) + 1, 1) + 2 * reset


def test_reset_applies_to_the_first_real_token_of_each_row():
    built = make("m4(reset=true)")
    tokens = torch.tensor([[0, 7, 8, 2], [PAD, 0, 7, 2]])
    query, key = torch.randn(2, 2, 2, 4, 8, dtype=torch.float64)
    both = reference.scores(query, key, built.terms(Positions.from_tokens(tokens, PAD, EOS, 4)))
    alone = our_scores(built, query[1, :, 1:], key[1, :, 1:])
    torch.testing.assert_close(both[1, :, 1:, 1:], alone)


ONE = torch.ones(1)


@pytest.mark.parametrize(
    ("left", "right", "message"),
    [
        (terms_of(query_table=ONE, product=True), terms_of(gain=ONE), "multiply"),
        (terms_of(query_table=ONE), terms_of(query_table=ONE), "query table"),
        (terms_of(scale_factor=1.0), terms_of(scale_factor=3.0), "factors .1 and 3."),
        (terms_of(bias=ONE, reset=ONE), terms_of(bias=ONE), "reset must apply"),
    ],
)
def test_terms_that_have_no_meaning_together_are_refused(left, right, message):
    with pytest.raises(UserError, match=message):
        left | right


def test_biases_of_two_encodings_add_up():
    both = terms_of(bias=torch.ones(1, 3)) | terms_of(bias=torch.ones(2, 3), pair_bias=ONE)
    torch.testing.assert_close(both.bias.table, torch.full((2, 3), 2.0))
    assert both.find(NumbersByPair) is not None


def test_a_part_of_odd_heads_can_be_rotated():
    built = build("rope(fraction=0.9)", Dims(18, 2, 8))
    heads = torch.randn(3, 5, 18).view(3, 5, 2, 9).permute(1, 2, 0, 3)
    query, _ = rotated(built, heads, heads, torch.arange(3)[None])
    torch.testing.assert_close(query[..., 8], heads[..., 8])
    torch.testing.assert_close(query.norm(dim=-1), heads.norm(dim=-1))


def test_values_by_distance_go_with_any_scale():
    (terms,) = draft_terms(specs.parse("shaw(scale_factor=2)+shaw_values"), DIMS, "auto")
    assert terms.find(ScaleFactor).factor == 2


def test_xpos_is_finite_in_fp16_at_both_ends_of_a_long_sequence():
    built = build("xpos", Dims(16, 2, 6500, causal=True))
    states = torch.randn(1, 2, 6500, 8, dtype=torch.float16)
    for side in rotated(built, states, states, torch.arange(6500)[None]):
        assert side.isfinite().all()
        assert side.abs().max() < torch.finfo(torch.float16).max


@pytest.mark.parametrize("zero", ["curvature", "length"])
def test_fire_has_its_limit_where_a_parameter_is_0(zero):
    """log(1 + a x) / log(1 + a y) tends to x / y, and a distance of 0 stays 0."""
    encoding = PositionEncoding("fire(threshold=4)", 16, 2, 8, causal=True).double()
    fire = encoding.encodings["fire"]
    torch.nn.init.zeros_(getattr(fire, zero))
    a, farthest = fire.curvature.item(), 4 * fire.length.item()
    query = torch.zeros(1, 2, 6, 8, dtype=torch.float64)
    scores = encoding.scores(query, query)
    for i, j in torch.ones(6, 6).tril().nonzero().tolist():
        back, most = i - j, max(i, farthest)
        relative = back / most if a == 0 and back else 0.0
        if a and back:
            relative = math.log1p(a * back) / math.log1p(a * most)
        hidden = (relative * fire.hidden_weight[:, 0] + fire.hidden_bias).relu()
        expected = fire.output_weight @ hidden + fire.output_bias
        torch.testing.assert_close(scores[0, :, i, j], expected, rtol=1e-6, atol=1e-7)
    scores.sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in fire.parameters())


@pytest.mark.parametrize("spec", ["fire", "tupe", "tupe_shared"])
def test_one_bias_serves_all_sentences_unless_one_is_padded_on_the_left(spec):
    built = make(spec)
    for row, batch in (([5, 7, 2, PAD], 1), ([PAD, 5, 7, 2], 2)):
        positions = Positions.from_tokens(torch.tensor([[5, 7, 8, 2], row]), PAD, EOS, 4)
        assert built.terms(positions).find(NumbersByPair).numbers.size(0) == batch


def test_right_padding_beyond_the_table_is_no_position():
    rows = DIMS.max_positions  # of the table, as many as real tokens
    states = [Positions.from_padding(torch.arange(n)[None] >= rows) for n in (rows, rows + 4)]
    for built in map(make, ("tupe", "tupe_shared")):
        plain, padded = (built.terms(x).find(NumbersByPair).numbers for x in states)
        torch.testing.assert_close(padded[..., :rows, :rows], plain)


@pytest.mark.parametrize("spec", ["alibi", "sandwich"])
def test_fixed_biases_do_not_lose_precision_with_the_model(spec):
    built = build(spec, DIMS)
    exact = built.terms(positions_of(8, 8)).bias.table
    assert torch.equal(built.half().terms(positions_of(8, 8)).bias.table, exact)


def test_sinusoids_do_not_lose_precision_with_the_model():
    built = build("sinusoidal", DIMS)["sinusoidal"]
    assert torch.equal(built.half().embed(positions_of(8, 8)), built.embed(positions_of(8, 8)))


@pytest.mark.parametrize(
    "spec",
    some_of(
        [
            *("alibi", "fire", "kerple", "cope", "inkling"),
            *("shaw", "shaw_values", "deberta_v2", "m3", "m4m"),
        ],
        encoding_specs("scores"),
    ),
)
def test_gradients_equal_differences(spec):
    built = make(spec, DIMS._replace(max_positions=4))
    query, key, value, states = (
        torch.randn(2, 3, width, dtype=torch.float64, requires_grad=True) for width in (8, 8, 8, 16)
    )

    def attended(query, key, value, states, *parameters):
        # The parameters are changed in place by gradcheck, so the modules see them.
        terms = built.terms(positions_of(3, 3)).projected(split_heads)
        if (rows := terms.rows("state")) is not None:
            terms = change_terms(terms, states=states[None, ..., : rows.table.size(-1)])
        call = AttentionCall(query[None], key[None], value[None], terms, Mask())
        return reference.attend(call)[0]

    leaves = (query, key, value, states, *built.parameters())
    assert torch.autograd.gradcheck(attended, leaves, fast_mode=True)


def test_gradients_of_values_by_distance_equal_those_of_the_formula():
    built = make("shaw_values")
    query, key, value = (
        torch.randn(2, 4, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)
    )
    leaves = [query, key, value, *built.parameters()]
    weight = torch.randn(2, 4, 8, dtype=torch.float64)
    terms = built.terms(positions_of(4, 4))
    call = AttentionCall(query[None], key[None], value[None], terms, Mask(), need_weights=True)
    ours, weights = reference.attend(call)
    scores = oracles.none(query, key, {}, {})
    allowed = oracles.allowed("both", 4, 4)
    (item,) = specs.parse("shaw_values").items
    params = {"value_table": built["shaw_values"].table.weight}
    theirs = oracles.shaw_values(scores, value, allowed, params, oracle_options(item))
    ours_sum = (ours[0] * weight).sum() + weights.square().sum()
    their_sum = (theirs * weight).sum() + oracles.attention_weights(scores, allowed).square().sum()
    ours_grads = torch.autograd.grad(ours_sum, leaves)
    torch.testing.assert_close(ours_grads, torch.autograd.grad(their_sum, leaves))


def test_rotary_cross_attention_refuses_what_would_pass_by_the_rotation():
    spec = "rope(cross_attention=true)"
    attention = make_model("translation", position_encoding=spec).decoder.layers[0].encoder_attn
    query, key = torch.randn(2, 3, 2, attention.embed_dim)
    for static_kv in (False, True):
        with pytest.raises(UserError, match="outside its stack"):
            attention(query, key, key, static_kv=static_kv)
    with pytest.raises(UserError, match="quant-noise-pq"):
        make_model("translation", position_encoding=spec, quant_noise_pq=0.1)


@pytest.mark.parametrize("reset", ["", "+reset"])
@pytest.mark.parametrize(("spec", "times"), [("tupe_shared", 50), ("tupe", 1000)])
@pytest.mark.parametrize("autocast", [False, True])
def test_large_comparisons_of_positions_fit_half_precision(spec, times, reset, autocast):
    """A score of 65,504 is the last that fp16 has; a model need not be near it to diverge."""
    built = build(spec + reset, Dims(768, 12, 64))
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.mul_(times)
    built = built if autocast else built.half()
    positions = positions_of(64, 64)
    with torch.autocast("cpu", torch.float16, enabled=autocast):
        terms = built.terms(positions)
    ours = terms.find(NumbersByPair).numbers
    assert terms.bias.table.isfinite().all()
    assert ours.isfinite().all()
    exact = built.double().terms(positions).find(NumbersByPair).numbers
    assert exact.abs().max() > 65_504
    assert (ours - exact).abs().max() < 1e-5 * exact.abs().max()


def test_a_stack_builds_each_encoding_once(monkeypatch):
    built = []
    begin = Encoding.__init__
    monkeypatch.setattr(
        Encoding, "__init__", lambda self, *args: (built.append(self.name), begin(self, *args))[1]
    )
    stack = StackPositions("learned+alibi+m4", 16, 2, max_positions=37)
    layers = [SelfAttention(stack) for _ in range(3)]
    # One for the questions (sizes, terms), one in the model; m4 has parameters in each layer.
    assert sorted(built) == ["alibi", "alibi", "learned", "learned", *["m4"] * (1 + len(layers))]


LAYOUTS = {
    "contiguous": lambda x: x.contiguous(),
    "heads behind tokens": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "coordinates before tokens": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    "batch last": lambda x: x.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2),
    "every second number": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "an odd offset": lambda x: torch.cat([x[..., :1], x], -1)[..., 1:],
    "an odd width": lambda x: torch.cat([x, x[..., :1]], -1)[..., :-1],
    "an odd start": lambda x: torch.cat([x.flatten()[:1], x.flatten()])[1:].view_as(x),
    "one row for all": lambda x: x[:, :, :1].expand_as(x),
}


@pytest.mark.parametrize(
    ("spec", "layout", "dtype"),
    product_of(
        ["rope", "rope(layout=half)", "rope(fraction=0.5)", "xpos", "pope"],
        LAYOUTS,
        [torch.float32, torch.float64, torch.bfloat16],
        times=3,
    ),
)
def test_rotations_take_every_layout_of_memory(spec, layout, dtype):
    positions = StackPositions(spec, 16, 2, causal=True)
    encoding = (positions.shared.as_list() or SelfAttention(positions).encodings.as_list())[0]
    rotation = encoding.rotation(torch.arange(5)[None])
    x = LAYOUTS[layout](torch.randn(3, 2, 5, 8, dtype=dtype))
    contiguous = x.clone(memory_format=torch.contiguous_format)
    for rotate in (rotation.rotate_queries, rotation.rotate_keys):
        torch.testing.assert_close(rotate(x), rotate(contiguous))


@pytest.mark.parametrize("spec", ["deberta_v2(buckets=8)", "t5(num_buckets=8,max_distance=20)"])
@pytest.mark.parametrize("causal", [False, True])
def test_each_distance_has_the_row_of_its_bucket(spec, causal):
    """Spans far beyond the trained length included, where the last bucket serves the rest."""
    (encoding,) = build(spec, DIMS._replace(causal=causal)).double().as_list()
    torch.nn.init.normal_(encoding.table)
    for tgt_len, src_len in [(4, 6), (1, 41), (71, 71)]:
        terms = encoding.all_terms(positions_of(tgt_len, src_len))
        distances = torch.arange(1 - src_len, tgt_len)
        starts, rows = encoding.bucket_rule
        index = torch.tensor(rows)[Runs(starts, 0, 0).find(distances)]
        if spec.startswith("t5"):
            expected, found = encoding.table[:, index], terms.bias.expand()
        else:
            normed = torch.nn.functional.layer_norm(encoding.table, (16,), eps=1e-7)
            expected, found = normed[None, index], terms.rows("layer").expand()
        torch.testing.assert_close(found, expected)
    (distinct,) = (x.table.size(1) for x in terms if isinstance(x, ByDistance))
    assert distinct <= 17
