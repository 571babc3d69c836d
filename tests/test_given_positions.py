"""Positions that a caller gives: distances are differences of ids, for every encoding."""

from __future__ import annotations

import cmath
import math
from itertools import product

import pytest
import torch
from torch import Tensor

from fairseq_posenc import registry, specs
from fairseq_posenc.api import Cache, CrossAttention, LayerPositions, SelfAttention, StackPositions
from fairseq_posenc.backends import planner, reference
from fairseq_posenc.backends.flex.scores import build_score_mod
from fairseq_posenc.errors import UserError
from fairseq_posenc.positions import Positions
from tests.helpers import oracles
from tests.helpers.formulas import (
    EOS,
    IN_FLOAT32,
    INPUTS,
    PAD,
    awake,
    make,
    our_scores,
    padding_of,
    rotated,
    their_scores,
)
from tests.helpers.products import product_of, some_of
from tests.helpers.terms import whole_call
from tests.helpers.tiny_models import COMPOSITIONS, encoding_specs, make_model, needs_causal
from tests.helpers.uncompiled_flex import attend_uncompiled

IDS = torch.tensor([[3, 0, 7, 7, 1, 12], [5, 6, 7, 9, 9, 19]])
ALL = [*registry.names(), *COMPOSITIONS, "m4m(max_distance=3)", "rope+chunk(size=4)"]
CHOSEN = some_of([name for name in registry.names()] + ["pope+fox", "m4m(max_distance=3)"], ALL)
# They count tokens, or read what the tokens say, not their positions.
UNREAD = ("fox", "cope")
# The first token, the end of a sentence and the tokens around one are those in their order.
BY_ORDER = ("reset", "sentence", "window", "chunk", "documents")
WITH_TABLES = [
    *("shaw(max_distance=4)", "m4", "m4m(reset=true)", "m2(max_distance=3)", "t5", "raffel"),
    *("deberta_v2", "transformer_xl", "raffel(reset=true)", "m1(max_distance=2)"),
]


def give(ids: Tensor, tgt_len: int) -> Positions:
    return Positions.from_tokens(torch.full(ids.shape, 5), PAD, EOS, tgt_len).replace_ids(ids)


def formula_at(built, spec: str, query: Tensor, key: Tensor, ids: Tensor) -> Tensor:
    """Return the oracle's scores: of a sentence in which each token is at its id."""
    tgt_len, src_len = query.size(1), key.size(1)
    length = int(ids.max()) + 1
    scores = torch.zeros(2, tgt_len, src_len, dtype=torch.float64)
    # A position that two tokens have is that of the one, then that of the other.
    repeats = torch.tensor([int(ids[:j].eq(ids[j]).sum()) for j in range(src_len)])
    for a, b in product(range(int(repeats.max()) + 1), repeat=2):
        queries = [t for t in range(tgt_len) if repeats[src_len - tgt_len + t] == a]
        keys = [j for j in range(src_len) if repeats[j] == b]
        rows, columns = ids[[src_len - tgt_len + t for t in queries]], ids[keys]
        full_query, full_key = torch.zeros(2, 2, length, query.size(2), dtype=torch.float64)
        full_query[:, rows], full_key[:, columns] = query[:, queries], key[:, keys]
        inputs = torch.zeros(length, INPUTS.size(1), dtype=torch.float64)
        inputs[rows] = INPUTS[[src_len - tgt_len + t for t in queries]].double()
        full = their_scores(built, spec, full_query, full_key, inputs)[:, rows][:, :, columns]
        scores[:, torch.tensor(queries, dtype=torch.long)[:, None], torch.tensor(keys)] = full
    return scores


@pytest.mark.parametrize(
    "spec",
    some_of(
        [
            *("shaw(max_distance=3)", "m4m(per_head=true)", "m3", "t5", "alibi", "kerple", "fire"),
            *("tupe", "deberta_v2", "transformer_xl", "sandwich", "rope", "xpos", "pope"),
            *("tupe_shared", "m1(max_distance=3)", "raffel+t5", "inkling"),
            "alibi(mode=asymmetric)",
        ],
        [
            spec
            for spec in (*encoding_specs("scores", "rotation"), *COMPOSITIONS)
            if not any(name in spec for name in (*UNREAD, "values", "reset", "sentence"))
        ],
    ),
)
@pytest.mark.parametrize("tgt_len", [3, 1])
def test_scores_equal_the_formula_at_the_ids(spec, tgt_len):
    built, ids = make(spec), torch.tensor([6, 2, 6, 0, 7])
    query = torch.randn(2, tgt_len, 8, dtype=torch.float64)
    key = torch.randn(2, 5, 8, dtype=torch.float64)
    ours, theirs = our_scores(built, query, key, ids), formula_at(built, spec, query, key, ids)
    tolerance = 1e-5 if IN_FLOAT32 & {item.name for item in specs.parse(spec).items} else 1e-12
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def build(spec: str, dtype: torch.dtype = torch.float64, **more) -> tuple:
    causal = more.pop("causal", needs_causal(spec))
    torch.manual_seed(0)
    positions = awake(StackPositions(spec, 16, 2, max_positions=24, causal=causal))
    return positions.to(dtype).eval(), awake(SelfAttention(positions, **more)).to(dtype).eval()


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("spec", CHOSEN)
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_batch_with_ids_of_its_own_equals_each_row_alone(spec, side):
    positions, layer = build(spec)
    x = torch.randn(2, 6, 16, dtype=torch.float64)
    padding = padding_of(6, 2 if side == "left" else -2, 0)
    ids = IDS.masked_fill(padding, 1)
    document_ids = torch.zeros(2, 6, dtype=torch.long) if spec == "documents" else None
    together = layer(*positions(x, padding, position_ids=ids, document_ids=document_ids))[0]
    for row in range(2):
        real = ~padding[row]
        alone = {"position_ids": ids[row, real][None]}
        if document_ids is not None:
            alone["document_ids"] = document_ids[row, real][None]
        close(together[row, real], layer(*positions(x[row, real][None], **alone))[0][0])


@pytest.mark.parametrize(
    "spec", [name for name in CHOSEN if not specs.parse(name).whole_stack and name != "window"]
)
def test_ids_matter_and_their_count_changes_nothing(spec):
    positions, layer = build(spec)
    x = torch.randn(2, 6, 16, dtype=torch.float64)
    counted = layer(*positions(x))[0]
    again = layer(*positions(x, position_ids=torch.arange(6)[None]))[0]
    torch.testing.assert_close(again, counted, rtol=0, atol=1e-12)
    if spec != "drope" and positions.id_readers:
        ids = torch.tensor([[20, 0, 7, 3, 13, 23]])
        assert not torch.allclose(layer(*positions(x, position_ids=ids))[0], counted)


@pytest.mark.parametrize("companion", ["softcap", "ssmax", "sink"])
def test_what_reads_no_positions_takes_real_ones_on_several_axes(companion):
    positions, layer = build(f"rope(axes=2)+{companion}")
    x = torch.randn(1, 6, 16, dtype=torch.float64)
    assert layer(*positions(x, position_ids=torch.rand(2, 1, 6)))[0].isfinite().all()


@pytest.mark.parametrize(
    "spec",
    some_of(
        [
            *("alibi+randomized", "alibi(mode=asymmetric)+randomized", "rope+t5", "deberta_v2"),
            *("tupe", "learned", "sinusoidal", "learned+rope(layout=half)"),
        ],
        [
            spec
            for spec in (*ALL, "alibi+randomized", "alibi(mode=asymmetric)+randomized")
            # In causal models the order says which keys are earlier.
            if not needs_causal(spec) and not any(x in spec for x in (*UNREAD, *BY_ORDER))
        ],
    ),
)
def test_the_order_of_tokens_changes_nothing(spec):
    positions, layer = build(spec)
    x, order = torch.randn(2, 6, 16, dtype=torch.float64), torch.randperm(6)
    given = layer(*positions(x, position_ids=IDS))[0]
    close(layer(*positions(x[:, order], position_ids=IDS[:, order]))[0], given[:, order])


@pytest.mark.parametrize(
    "spec",
    [
        *(name for name in CHOSEN if "randomized" not in name),
        *("alibi+window(size=3,first=2)", "t5+window(size=2,first=1)", "m4+window(size=3)"),
    ],
)
def test_decoding_with_ids_equals_the_full_pass(spec):
    positions, layer = build(spec, causal=True)
    x = torch.randn(2, 6, 16, dtype=torch.float64)
    documents = torch.zeros(2, 6, dtype=torch.long) if spec == "documents" else None
    full = layer(*positions(x, position_ids=IDS, document_ids=documents))[0]
    cache = Cache()
    for start, stop in ((0, 2), (2, 3), (3, 6)):
        given = {"position_ids": IDS[:, start:stop]}
        if documents is not None:
            given["document_ids"] = documents[:, :stop]
        out = layer(*positions(x[:, start:stop], past=cache, **given), cache)[0]
        close(out, full[:, start:stop])


def test_a_beam_carries_its_ids():
    positions, layer = build("t5", causal=True)
    x, rows = torch.randn(2, 6, 16, dtype=torch.float64), torch.tensor([1, 1])
    cache = Cache()
    layer(*positions(x[:, :5], position_ids=IDS[:, :5], past=cache), cache)
    cache.reorder(rows)
    step = layer(*positions(x[rows, 5:], past=cache, position_ids=IDS[rows, 5:]), cache)[0]
    close(step, layer(*positions(x[rows], position_ids=IDS[rows]))[0][:, 5:])
    with pytest.raises(UserError, match="in the cache had position_ids: give those of the new"):
        layer(*positions(x[:, :1], past=cache), cache)
    for others in ([0], [0, 1, 0, 1]):
        message = f"the cache has a batch size of 2, and the embeddings {len(others)}"
        with pytest.raises(UserError, match=message):
            positions(x[others, :1], past=cache, position_ids=IDS[others, :1])
    with pytest.raises(UserError, match="in the cache had position_ids: give those of the new"):
        layer(*positions(x[:, :1], past=6), cache)
    with pytest.raises(UserError, match=r"also needs those of the earlier tokens, \(2 or 1, 7\)"):
        positions(x[:, :1], past=6, position_ids=IDS[:, :1])


@pytest.mark.parametrize("spec", ["shaw", "alibi", "m4m(reset=true)", "t5", "transformer_xl"])
def test_ids_that_grow_by_one_are_served_as_places(spec):
    positions, layer = build(spec, backend="blocked")
    x = torch.randn(2, 6, 16, dtype=torch.float64)
    padding = padding_of(6, 0, 2)
    ids = torch.tensor([[9, 10, 11, 12, 13, 14], [0, 0, 3, 4, 5, 6]])
    counted = layer(*positions(x, padding))[0][~padding]
    close(layer(*positions(x, padding, position_ids=ids))[0][~padding], counted)
    with pytest.raises(UserError, match="blocked cannot compute this: it needs position_ids"):
        build("shaw", backend="blocked")[1](*build("shaw")[0](x, position_ids=IDS))


def test_documents_have_ids_of_their_own():
    positions, layer = build("shaw+documents")
    x = torch.randn(1, 6, 16, dtype=torch.float64)
    documents = torch.tensor([[0, 0, 0, 1, 1, 1]])
    for ids in (torch.tensor([[4, 5, 6, 0, 1, 2]]), torch.tensor([[4, 1, 6, 9, 1, 2]])):
        packed = layer(*positions(x, position_ids=ids, document_ids=documents))[0]
        for part in (slice(0, 3), slice(3, 6)):
            alone = {"position_ids": ids[:, part], "document_ids": documents[:, part]}
            close(packed[:, part], layer(*positions(x[:, part], **alone))[0])


def test_sentences_and_documents_begin_after_an_end():
    x, ends = torch.randn(1, 5, 16, dtype=torch.float64), torch.tensor([[0, 0, 1, 0, 0]]).bool()
    positions, _ = build("sentence_learned")
    table = positions.get_parameter("input.sentence_learned.table.weight")
    close(positions(x, ends=ends)[0] - x, table[[0, 1, 2, 1, 2]][None])
    restarting, padding = torch.tensor([[0, 1, 2, 0, 1]]), torch.tensor([[0, 0, 0, 0, 1]]).bool()
    given = positions(x, padding, position_ids=restarting, ends=ends)[0] - x
    close(given[:, :4], table[[0, 1, 2, 0]][None])
    with pytest.raises(UserError, match="sentence_learned also needs those of the earlier tokens"):
        positions(x[:, 3:], past=3, position_ids=torch.tensor([[3, 4]]), ends=ends)
    positions, layer = build("shaw+documents")
    numbered = positions(x, document_ids=torch.tensor([[0, 0, 0, 1, 1]]))
    close(layer(*positions(x, ends=ends))[0], layer(*numbered)[0])


def test_the_planner_says_why_ids_keep_a_backend_away(caplog):
    positions, layer = build("shaw")
    planner._logged.clear()
    with caplog.at_level("INFO"):
        ids = torch.randperm(20).repeat(3)[None]
        layer(*positions(torch.randn(1, 60, 16).double(), position_ids=ids))
    assert "reference, " in caplog.text
    assert "not blocked: it needs position_ids that grow by one" in caplog.text


TIMES = torch.tensor([0.25, 1.5, 1.5, 4.125, 9.0, 20.75])


def test_real_positions_turn_queries_and_keys():
    built, x = make("rope"), torch.randn(2, 6, 8, dtype=torch.float64)
    ours, _ = rotated(built, x[None], x[None], TIMES[None])
    for h, i, t in product(range(2), range(6), range(4)):
        angle = float(TIMES[i]) * 10000 ** (-2 * t / 8)
        theirs = complex(*x[h, i, 2 * t : 2 * t + 2]) * cmath.exp(1j * angle)
        assert abs(complex(*ours[0, h, i, 2 * t : 2 * t + 2]) - theirs) < 1e-5


@pytest.mark.parametrize("name", [x for x in registry.names() if registry.get(x).takes_real_ids])
def test_real_positions_are_not_rounded(name):
    positions, layer = build(name, causal=True)
    x = torch.randn(1, 6, 16, dtype=torch.float64)
    whole = layer(*positions(x, position_ids=IDS[1:]))[0]
    close(layer(*positions(x, position_ids=IDS[1:].float()))[0], whole)
    for part in (0.25, -0.25):
        ids = IDS[1:] + part * torch.eye(6)[-1]  # of the last token
        assert not torch.allclose(layer(*positions(x, position_ids=ids))[0], whole)


def test_real_positions_have_sinusoids():
    positions, _ = build("sinusoidal", torch.float32)
    vectors = positions(torch.zeros(1, 6, 16), position_ids=TIMES[None])[0][0]
    for i, t in product(range(6), range(8)):
        angle = float(TIMES[i]) / 10000 ** (2 * t / 16)
        assert abs(float(vectors[i, 2 * t]) - math.sin(angle)) < 1e-5
        assert abs(float(vectors[i, 2 * t + 1]) - math.cos(angle)) < 1e-5


@pytest.mark.parametrize("name", ["alibi", "kerple", "fire"])
def test_real_positions_have_distances(name):
    built = make(name)
    query, key = torch.randn(2, 2, 6, 8, dtype=torch.float64)
    ours = our_scores(built, query, key, TIMES)
    given = {key.split(".")[-1]: x for key, x in built.named_parameters()}
    for h, i, j in product(range(2), range(6), range(6)):
        back = float(TIMES[i] - TIMES[j])
        content = float(query[h, i] @ key[h, j]) / math.sqrt(8)
        if name == "alibi":
            bias = -oracles.alibi_slopes(2)[h] * abs(back)
        elif name == "kerple":
            bias = -given["r1"][h] * torch.log(1 + given["r2"][h] * abs(back))
        else:
            c, longest = given["curvature"].abs(), (given["length"] * 512).abs()
            furthest = torch.log(1 + c * max(float(TIMES[i]), float(longest)))
            x = torch.log(1 + c * max(back, 0)) / furthest
            hidden = (given["hidden_weight"][:, 0] * x + given["hidden_bias"]).clamp(min=0)
            bias = given["output_weight"][h] @ hidden + given["output_bias"][h]
        assert abs(float(ours[h, i, j]) - content - float(bias)) < 1e-6


def test_real_positions_are_refused_where_rows_are_counted():
    x = torch.randn(1, 6, 16)
    for spec in ("learned", "t5", "rope+shaw", "sandwich", "tupe", "transformer_xl"):
        positions = StackPositions(spec, 16, 2)
        name = spec.split("+")[-1]
        message = rf"position_ids must be whole numbers \(torch.long\) for {name}, not float32"
        with pytest.raises(UserError, match=message):
            positions(x, position_ids=TIMES[None])
    faults = {-1.25: r"-1\.0 is below 0", math.nan: "nan is not", math.inf: "inf is not finite"}
    for change, message in faults.items():
        with pytest.raises(UserError, match=f"position_ids: {message}"):
            StackPositions("rope", 16, 2)(x, position_ids=TIMES[None] + change)


def test_a_source_has_ids_of_its_own():
    torch.manual_seed(0)
    positions = StackPositions("rope(cross_attention=true)", 16, 2, causal=True).double().eval()
    layer = CrossAttention(positions).double().eval()
    x, source = torch.randn(2, 4, 16).double(), torch.randn(2, 6, 16).double()
    padding = padding_of(6, 2, 0)
    shared = positions(x, position_ids=IDS[:, :4])[1]
    together = layer(x, source, shared, padding, source_position_ids=IDS)[0]
    for row in range(2):
        real, ids = ~padding[row], IDS[row : row + 1]
        of_row = positions(x[[row]], position_ids=ids[:, :4])[1]
        given = {"source_position_ids": ids[:, real]}
        close(together[[row]], layer(x[[row]], source[row, real][None], of_row, **given)[0])
    with pytest.raises(UserError, match=r"source_position_ids \(2, 5\) must be \(2 or 1, 6\)"):
        layer(x, source, shared, source_position_ids=IDS[:, 1:])
    with pytest.raises(UserError, match="source_position_ids: -3 is below 0"):
        layer(x, source, shared, source_position_ids=IDS - 3)


@pytest.mark.parametrize(("spec", "tgt_len"), product_of(WITH_TABLES, [6, 2]))
def test_flex_looks_rows_up_by_ids(spec, tgt_len):
    positions, layer = build(spec, torch.float32)
    x = torch.randn(2, 6, 16)
    query, key, value = torch.randn(3, 2, 2, 6, 8)
    query = query[:, :, 6 - tgt_len :]
    _, (state,) = positions(x[:, 6 - tgt_len :], past=6 - tgt_len, position_ids=IDS)
    call = whole_call(layer, state, query, key, value)
    expected = reference.attend(call)[0]
    modify = build_score_mod(call.terms, tgt_len, 6, query.device, query=call.query, key=call.key)
    ours = attend_uncompiled(call.query, call.key, call.value, modify, scale=call.terms.scale(8))
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("spec", ["rope+t5", "alibi", "raffel+alibi", "raffel(reset=true)"])
def test_parts_of_a_layer_take_ids(spec):
    positions, layer = build(spec, torch.float32)
    parts = awake(LayerPositions(positions))
    parts.encodings.load_state_dict(layer.encodings.state_dict())
    shared = positions(torch.randn(2, 6, 16), position_ids=IDS)[1]
    query, key, value = torch.randn(3, 2, 2, 6, 8)
    expected = reference.attend(whole_call(layer, shared[0], query, key, value))[0]
    query, key = parts.rotate(query, key, shared)
    attention = torch.nn.functional.scaled_dot_product_attention
    ours = attention(query, key, value, parts.bias(shared), scale=parts.scale)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)
    ours = attend_uncompiled(query, key, value, parts.score_mod(shared), scale=parts.scale)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("spec", ["t5", "alibi", "raffel", "kerple", "raffel+fire", "rope"])
@pytest.mark.parametrize("direction", ["both", "lr"])
def test_fused_attention_equals_the_reference(spec, direction):
    positions, layer = build(spec, causal=True)
    x = torch.randn(2, 6, 16, dtype=torch.float64)
    padding = padding_of(6, 0, 2)
    layer.direction = direction
    outputs = []
    for backend in ("reference", "sdpa"):
        layer.backend = backend
        outputs.append(layer(*positions(x, padding, position_ids=IDS))[0])
    close(*outputs)


@pytest.mark.parametrize(
    "spec", some_of(["m4m(max_distance=3)"], ["m4m(max_distance=3)", "rope+t5", "alibi"])
)
def test_a_graph_takes_ids(spec):
    positions, layer = build(spec, torch.float32)

    def run(x: Tensor, ids: Tensor) -> Tensor:
        return layer(*positions(x, position_ids=ids))[0]

    torch._dynamo.reset()
    compiled = torch.compile(run, backend="eager", fullgraph=True)
    for length in (6, 5):
        given = torch.randn(2, length, 16), IDS[:, :length]
        torch.testing.assert_close(compiled(*given), run(*given), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("transformer_xl", "a row for each distance between position_ids"),
        *((x, "out of bounds") for x in some_of(["tupe"], ["tupe", "tupe_shared"])),  # of 24 rows
    ],
)
def test_a_graph_refuses_ids_without_a_row(spec, message):
    positions, layer = build(spec, torch.float32)
    torch._dynamo.reset()
    run = torch.compile(lambda x, ids: layer(*positions(x, position_ids=ids))[0], backend="eager")
    with pytest.raises(Exception, match=message):
        run(torch.randn(1, 30, 16), torch.arange(30)[None])


@pytest.mark.parametrize("spec", ["shaw", "t5", "alibi", "m4m", "rope", "tupe"])
def test_half_precision_stays_near(spec):
    positions, layer = build(spec, torch.float32)
    x = torch.randn(2, 6, 16)
    exact = layer(*positions(x, position_ids=IDS))[0]
    positions, layer = positions.bfloat16(), layer.bfloat16()
    half = layer(*positions(x.bfloat16(), position_ids=IDS))[0]
    assert (half.float() - exact).norm() < 0.1 * exact.norm()


def test_gradients_add_up_over_the_pairs_of_a_row():
    positions, layer = build("shaw(max_distance=2)")
    table = layer.encodings["shaw"].table.weight
    x = torch.randn(2, 6, 16, dtype=torch.float64)
    (whole,) = torch.autograd.grad(layer(*positions(x, position_ids=IDS))[0].square().sum(), table)
    parts = 0
    for row in range(2):
        alone = layer(*positions(x[[row]], position_ids=IDS[[row]]))[0].square().sum()
        parts = parts + torch.autograd.grad(alone, table)[0]
    close(whole, parts)


@pytest.mark.parametrize("spec", ["alibi", "learned+m4m", "rope+t5", "sentence_learned+shaw"])
@pytest.mark.parametrize("family", ["masked_lm", "causal_lm"])
@torch.no_grad()
def test_models_of_fairseq_take_ids(spec, family):
    model = make_model(family, position_encoding=spec).eval()
    for name, parameter in model.named_parameters():
        if ".encodings." in name or "q_proj.weight" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    tokens = torch.randint(4, 12, (2, 6))
    padded = torch.cat([torch.full((2, 2), PAD), tokens], 1)

    def run(tokens: Tensor, **given) -> Tensor:
        return model(tokens, **given)[0]

    full = run(tokens, position_ids=IDS)
    assert not torch.allclose(full, run(tokens), atol=1e-4)
    count = run(tokens, position_ids=torch.arange(6)[None])
    torch.testing.assert_close(count, run(tokens), rtol=1e-4, atol=1e-5)
    with_padding = run(padded, position_ids=torch.cat([torch.zeros(2, 2).long(), IDS], 1))
    torch.testing.assert_close(with_padding[:, 2:], full, rtol=1e-4, atol=1e-5)
    for row in range(2):
        alone = run(tokens[[row]], position_ids=IDS[[row]])
        torch.testing.assert_close(alone, full[[row]], rtol=1e-4, atol=1e-5)
    with pytest.raises(UserError, match=r"position_ids \(2, 5\) must be \(2 or 1, 6\)"):
        run(tokens, position_ids=IDS[:, 1:])
    if family == "causal_lm":
        with pytest.raises(UserError, match="fairseq decodes with positions that it counts"):
            run(tokens, position_ids=IDS, incremental_state={})
