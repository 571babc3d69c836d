"""Windows and chunks: each query sees the keys that their definitions name, on every backend."""

from __future__ import annotations

import itertools
from functools import cache

import pytest
import torch

from fairseq_posenc.api import SelfAttention, StackPositions
from fairseq_posenc.backends import BACKENDS, attend, blocked, planner, reference
from fairseq_posenc.backends.base import AttentionCall
from fairseq_posenc.encodings.base import ENCODINGS
from fairseq_posenc.encodings.local_attention import Window
from fairseq_posenc.encodings.terms import Terms
from fairseq_posenc.errors import UserError
from fairseq_posenc.mask import Mask
from fairseq_posenc.modules.attention_core import Cache
from tests.helpers import oracles, tiny_models
from tests.helpers.formulas import awake, padding_of
from tests.helpers.products import product_of, some_of
from tests.helpers.terms import whole_call
from tests.transformer.test_attention import attend_by_formula, make, scores_and_values

SPECS = ["none", *tiny_models.encoding_specs("scores", "rotation"), *tiny_models.COMPOSITIONS]
WITHOUT_VALUES = [spec for spec in SPECS if "values" not in spec]
BOTH_LIMITS = "window(size=4)+chunk(size=3)"
FIRST = "window(size=4,first=2)"
LIMITS = ["window(size=1)", "window(size=4)", "window(size=5)", "chunk(size=4)", FIRST]
LENGTH = 17


def is_visible(limits: str, direction: str, i: int, j: int) -> bool:
    """Say whether query ``i`` sees key ``j``, both counted from the first real token."""
    if (direction == "lr" and j > i) or (direction == "rl" and j < i):
        return False
    for limit in limits.split("+"):
        name, options = limit.rstrip(")").split("(size=")
        size, _, first = options.partition(",first=")
        if first and j < int(first):
            continue
        if name == "chunk" and i // int(size) != j // int(size):
            return False
        reach = int(size) // 2 if direction == "both" else int(size) - 1
        if name == "window" and abs(j - i) > reach:
            return False
    return True


@cache
def visible(limits: str, direction: str, length: int) -> torch.Tensor:
    places = range(length)
    return torch.tensor([[is_visible(limits, direction, i, j) for j in places] for i in places])


@pytest.mark.parametrize(
    "spec", some_of([spec for spec in WITHOUT_VALUES if "(" not in spec], WITHOUT_VALUES)
)
def test_equals_the_formula_with_padding_on_either_side(spec, monkeypatch):
    monkeypatch.setattr("fairseq_posenc.backends.planner.SHORT", 0)  # so that `auto` takes blocks
    x = torch.randn(LENGTH, 2, 16, dtype=torch.float64)
    padding = padding_of(LENGTH, -2, 3)
    first = make(spec, tiny_models.directions(spec)[0])
    by_formula = [scores_and_values(first, spec, x[~padding[b], b]) for b in range(2)]
    cases = [*((limits, "auto") for limits in LIMITS[1:]), (BOTH_LIMITS, "reference")]
    # Every encoding meets all limits and all directions, and over all encodings these all pairs.
    ways, first_way = tiny_models.directions(spec), WITHOUT_VALUES.index(spec)
    for number, (limits, backend) in enumerate(cases, first_way):
        if spec.startswith("cope") and limits == FIRST:  # it counts visible keys: the next test
            continue
        direction = ways[number % len(ways)]
        attention = make(f"{spec}+{limits}", direction, backend)
        attention.load_state_dict(first.state_dict())
        ours, _ = attention(x, x, x, key_padding_mask=padding)
        for b in range(2):
            real = ~padding[b]
            allowed = visible(limits, direction, int(real.sum()))
            theirs = attend_by_formula(attention, spec, *by_formula[b], allowed)
            torch.testing.assert_close(ours[real, b], theirs, rtol=1e-5, atol=1e-5)
        assert ours.isfinite().all()


@pytest.mark.parametrize("limits", [FIRST, "window(size=1,first=3)", "window(size=5)"])
def test_cope_counts_the_keys_that_a_query_sees(limits):
    """The keys between the first ones and the window, which caches drop, count nothing."""
    attention = make(f"cope+{limits}", "lr")
    x = torch.randn(LENGTH, 2, 16, dtype=torch.float64)
    padding = padding_of(LENGTH, 0, 3)
    ours, _ = attention(x, x, x, key_padding_mask=padding)
    table = attention.encodings.cope.table.detach().double()
    for b in range(2):
        real = ~padding[b]
        allowed = visible(limits, "lr", int(real.sum()))
        query, key, value = (y[0] for y in attention.project(x[real, b : b + 1]))
        scores = oracles.cope(query, key, {"table": table}, {"visible": allowed})
        theirs = attend_by_formula(attention, "cope", scores, value, allowed)
        torch.testing.assert_close(ours[real, b], theirs, rtol=1e-11, atol=1e-11)


RUNS = ["m4m(max_distance=2)", "deberta_v2(buckets=4)", "shaw_values(max_distance=1)"]
OF_BLOCKS = ["none", "m4m", "shaw+shaw_values", "t5", "m4(reset=true)", "tupe(reset=true)"]
OF_BLOCKS += ["tupe_shared"]


@pytest.mark.parametrize(
    ("spec", "limits", "direction"),
    product_of(
        OF_BLOCKS,
        ["window(size=40)", "chunk(size=50)", "window(size=90)", "window(size=40,first=4)"],
        ["both", "lr", "rl"],
        times=3,
    ),
)
def test_blocks_and_their_gradients_equal_the_references(spec, limits, direction):
    """Several blocks, tiles that are skipped, padding, and lengths that fill no tile."""
    compare_blocks(f"{spec}+{limits}", direction, 1e-6, key_padding_mask=padding_of(333, -30, 60))


def compare_blocks(spec: str, direction: str, tolerance: float, **named) -> None:
    """Compare blocks with the reference, and the gradients of inputs and all parameters."""
    batch, length = next(iter(named.values())).shape  # of the mask, or the ids of documents
    positions = awake(StackPositions(spec, 16, 2, length, causal=direction == "lr")).double()
    layers = [
        SelfAttention(positions, direction=direction, backend=name).double()
        for name in ("reference", "blocked")
    ]
    layers[1].load_state_dict(awake(layers[0]).state_dict())
    inputs, found = torch.randn(batch, length, 16, dtype=torch.float64), []
    for layer in layers:
        x = inputs.clone().requires_grad_()
        positions.zero_grad()
        out, _ = layer(*positions(x, **named))
        (out * torch.linspace(-1, 1, 16, dtype=torch.float64)).sum().backward()
        parameters = [*layer.parameters(), *positions.parameters()]
        found.append([out, x.grad, *(p.grad.clone() for p in parameters if p.grad is not None)])
    torch.testing.assert_close(*reversed(found), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("spec", ["none", "m4m", "t5", "fire", "tupe_shared"])
def test_blocks_of_documents_and_their_gradients_equal_the_references(spec):
    # The first two sentences have few borders in common, the third is one document.
    ids = torch.stack([torch.arange(333) // size for size in (70, 113, 333)])
    compare_blocks(f"{spec}+documents", "lr", 1e-6, document_ids=ids)


def test_a_window_that_reaches_over_all_keys_is_left_out(monkeypatch):
    for direction, needless in (("lr", 9), ("rl", 9), ("both", 16)):
        assert not Mask(direction, window=needless).without_needless_window(src_len=9).has_limits
        assert Mask(direction, window=needless - 1).without_needless_window(src_len=9).has_limits
    mask = Mask("lr", window=9, first_keys=torch.arange(9)[None] < 2)
    assert mask.without_needless_window(src_len=9) == Mask("lr")
    calls, real = [], planner.choose
    monkeypatch.setattr(planner, "choose", lambda *given: calls.append(given[1]) or real(*given))
    assert attend(AttentionCall(*torch.randn(3, 1, 2, 9, 8), Terms(), mask))[1] is None
    assert [call.mask.has_limits for call in calls] == [False]


def test_first_keys_are_needed_beside_the_last_ones_of_a_window():
    ours, theirs = (Mask(window=n + 3, first_keys=torch.arange(9)[None] < n) for n in (2, 5))
    last, first = ours.needed_keys()
    assert (last, first.tolist(), (theirs & ours).window) == (4, [0, 1], 5)
    assert theirs.needed_keys(new_tokens=5)[1].tolist() == [0, 1, 2, 3]
    assert Mask(window=5, longest_segment=4).needed_keys() == (3, None)
    segments = torch.tensor([[0, 0, 0, 0, 0, 0, 0, 1, 1]])
    other = ours._replace(segments=segments)  # the first keys were those of another segment
    assert other.needed_keys()[1].tolist() == []
    assert other.needed_keys(new_tokens=3)[1].tolist() == [0, 1]


def test_a_second_window_that_hides_first_keys_is_refused(monkeypatch):
    monkeypatch.setitem(ENCODINGS, "second", type("Second", (Window,), {}))
    with pytest.raises(UserError, match="one hides the first keys of the other"):
        StackPositions("rope+window(size=4,first=2)+second", 16, 2)


@pytest.mark.parametrize("other", ["rope+window(size=4)", "rope"])
def test_where_a_layer_sees_first_keys_the_ids_of_all_tokens_are_needed(other):
    positions = StackPositions(f"rope+window(size=4,first=2),{other}", 16, 2, 40, causal=True)
    with pytest.raises(UserError, match="also needs those of the earlier tokens"):
        positions(torch.randn(1, 1, 16), past=5, position_ids=torch.tensor([[5]]))


@pytest.mark.parametrize(("spec", "window"), product_of(["none", "m4m", "t5"], [3, 40]))
def test_the_first_tokens_of_each_document_stay_visible(spec, window):
    """On each backend, against a mask of pairs; in a causal model and in an encoder."""
    limits = f"window(size={window},first=4)"
    in_documents = f"{spec}+{limits}+documents"
    lengths = [(70, 70, 10), (41, 41, 41, 27)]
    ids = torch.stack([torch.arange(150) // row[0] for row in lengths])
    x = torch.randn(2, 150, 16, dtype=torch.float64)
    for direction in ("lr", "both"):
        blocks = [[visible(limits, direction, n).int() for n in row] for row in lengths]
        seen = [torch.block_diag(*row).bool() for row in blocks]
        positions = StackPositions(in_documents, 16, 2, 150, direction == "lr").double()
        layer = SelfAttention(positions, backend="reference").double()
        embedded, (state,) = positions(x, document_ids=ids)
        call = whole_call(layer, state, *layer.project(embedded))
        pairs = [
            call._replace(
                **{n: getattr(call, n)[b : b + 1] for n in ("query", "key", "value")},
                mask=Mask(direction, pairs=~seen[b]),
            )
            for b in range(2)
        ]
        expected = torch.cat([reference.attend(each)[0] for each in pairs])
        for name in ("reference", "blocked", "sdpa"):
            if BACKENDS[name].refuses(call):
                assert name == "sdpa"
                continue
            found, _ = BACKENDS[name].attend(call)
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def count_pairs(query: torch.Tensor, mask: Mask) -> int:
    pairs, call = query @ query.mT, AttentionCall(query, query, query, Terms(), mask)
    return sum(block.select(pairs, "BHTS").numel() for block in blocked.split(call))


@pytest.mark.parametrize("direction", ["both", "lr", "rl"])
def test_blocks_leave_out_hidden_keys(direction):
    query = torch.randn(1, 1, 4096, 8)
    chunks = torch.arange(4096)[None] // 256
    limits = [Mask(direction, window=256), Mask(direction, segments=chunks)]
    whole, *limited = (count_pairs(query, mask) for mask in (Mask(direction), *limits))
    assert all(pairs < whole / 5 for pairs in limited)


@pytest.mark.parametrize("direction", ["both", "lr", "rl"])
@pytest.mark.parametrize("spec", ["none+sink", "m4m", "fox+ssmax", "shaw_values+alibi"])
def test_blocks_hide_the_keys_between_the_first_ones_and_the_window(spec, direction):
    padding = padding_of(700, -40, 50)
    compare_blocks(f"{spec}+window(size=30,first=3)", direction, 1e-9, key_padding_mask=padding)


@pytest.mark.parametrize("direction", ["both", "lr", "rl"])
@pytest.mark.parametrize("tgt_len", [9, 4])
def test_a_mask_is_its_definition_for_each_pair(direction, tgt_len):
    padding = padding_of(9, 2, -2)
    segments = torch.arange(9).expand(2, -1) // torch.tensor([[3], [4]])
    first_keys, pairs = torch.arange(9)[None] == 1, torch.rand(tgt_len, 9) < 0.3
    masks = [Mask(direction), Mask(direction, padding), Mask(direction, padding, pairs)]
    sizes = (tgt_len, 9, padding.device)
    of_chunks, descending = (Mask(window=5, segments=x) for x in (segments, segments.flip(1)))
    of_first = of_chunks._replace(first_keys=first_keys)
    for limits in (Mask(window=3), of_chunks, descending, of_first):
        reach = limits.window // 2 if direction == "both" else limits.window - 1
        for mask in (mask & limits for mask in masks):
            found = mask.forbidden(*sizes).expand(2, -1, -1, -1)[:, 0]
            assert torch.equal(mask.count_visible(*sizes).expand(2, -1), (~found).sum(-1))
            for b, i, j in itertools.product(range(2), range(9 - tgt_len, 9), range(9)):
                hidden = {"both": False, "lr": j > i, "rl": j < i}[direction]
                hidden |= abs(j - i) > reach and (limits.first_keys is None or j != 1)
                if (numbers := limits.segments) is not None:
                    hidden |= bool(numbers[b, i] != numbers[b, j])
                hidden |= mask.key_padding is not None and bool(padding[b, j])
                hidden |= mask.pairs is not None and bool(pairs[i - 9 + tgt_len, j])
                assert found[b, i - 9 + tgt_len, j] == hidden


def test_sentences_leave_out_keys_that_only_others_see():
    """Documents with borders of their own: a batch computes what its sentences do one by one."""
    ids = (torch.rand(4, 2048) < 1 / 200).cumsum(1)

    def count(segments, rows):
        return count_pairs(torch.randn(4, 2, 2048, 8)[:rows], Mask("lr", segments=segments))

    alone = [count(ids[row : row + 1], 1) for row in range(4)]
    assert count(ids, 4) == sum(alone)
    assert count(ids[:1].expand(4, -1), 4) == 4 * alone[0]  # equal ones are computed together


LAST = {limits: 2 for limits in ("window(size=3)", "chunk(size=3)", BOTH_LIMITS)}
LAST |= {"window(size=3,first=2)": 4, "window(size=6)": 5}  # limits, and the keys that are kept


@pytest.mark.parametrize(
    ("spec", "limits", "family"),
    product_of(
        ["rope", "t5", "m4+reset", "learned+shaw", "tupe", *RUNS],
        LAST,
        ["causal_lm", "translation"],
        times=2,
    ),
)
def test_decoding_equals_the_full_pass(spec, limits, family):
    model = tiny_models.make_model(family, position_encoding=f"{spec}+{limits},none")
    source = tiny_models.make_tokens(2, padding=2)
    order = [0, 0] if family == "causal_lm" else [0, 1]
    tiny_models.assert_decoding_equals_full_pass(model, family, source[:1], [[0]] * 8)
    state = tiny_models.assert_decoding_equals_full_pass(model, family, source, [order] * 8)
    # The layers with limits have kept what later queries will see, the others everything.
    own = [key for key, x in state.items() if isinstance(x, dict) and "prev_key" in x]
    assert {state[key]["prev_key"].size(2) for key in own} - {source.size(1)} == {LAST[limits], 8}


STEPS = [slice(0, 12), *(slice(i, i + 1) for i in range(12, 17)), slice(17, 20), slice(20, 30)]
# Of every kind of term: none, by distance whole, in runs and by pair, rotations, decay, counts.
KINDS = ["none", "rope", "xpos", "t5", "m4m", "m4m(max_distance=2)", "shaw_values", "fire"]
KINDS += ["tupe+reset", "deberta_v2(buckets=4)", "fox", "pope", "cope", "none+ssmax"]
KEPT = [  # limits, and the number of keys that a cache may have after STEPS
    ("window(size=4)", 3),
    ("chunk(size=4)", 3),
    ("window(size=4,first=2)", 3 * 2 + 3),
    ("window(size=1,first=3)", 3 * 3 + 1),
    ("window(size=5,first=2)+chunk(size=7)", 4),
    ("window(size=9,first=3)+chunk(size=4)", 3),
    ("window(size=4,prefill=true)", 30),
    ("window(size=1,first=3,prefill=true)+chunk(size=11)", 10),
]
OF_KINDS = product_of(some_of(KINDS, [spec for spec in SPECS if "documents" not in spec]), KEPT)
ALONE = [("fox", f"{limit}(size=1)", 1) for limit in ("window", "chunk")]  # sums of decay go on


@pytest.mark.parametrize(("spec", "limits", "kept"), [*OF_KINDS, *ALONE])
def test_a_cache_keeps_the_keys_that_are_visible_by_definition(spec, limits, kept):
    """Steps of one and of several tokens, rows padded on the left, against masks of pairs."""
    positions = awake(StackPositions(f"{spec}+{limits}", 16, 2, 40, causal=True)).double().eval()
    layer = awake(SelfAttention(positions, backend="reference")).double().eval()
    x, cache = torch.randn(3, 30, 16, dtype=torch.float64), Cache()
    padding = torch.arange(30) < torch.tensor([[0], [3], [9]])
    steps = [
        layer(*positions(x[:, step], padding[:, : step.stop], past=step.start), cache)[0]
        for step in STEPS
    ]
    for b, left in enumerate((0, 3, 9)):
        row, (state,) = positions(x[b : b + 1, left:])
        call = whole_call(layer, state, *layer.project(row), row)
        seen = visible(limits.replace(",prefill=true", ""), "lr", 30 - left).clone()
        if "prefill" in limits:  # the tokens that were computed alone have no window
            alone = slice(12 - left, 17 - left)
            chunk = "chunk(size=11)" if "chunk" in limits else "chunk(size=30)"
            seen[alone] = visible(chunk, "lr", 30 - left)[alone]
        expected = reference.attend(call._replace(mask=Mask(pairs=~seen)))[0]
        found = torch.cat(steps, 1)[b : b + 1, left:]
        torch.testing.assert_close(found, layer.project_output(expected), rtol=1e-11, atol=1e-11)
    assert cache.kept.key.size(2) == cache.kept.value.size(2) <= kept


@pytest.mark.parametrize("spec", ["m4m", "fox", "rope+t5"])
def test_a_cache_forgets_the_first_keys_of_earlier_documents(spec):
    """Rows whose documents begin in different places, reordered as beams are."""
    ids = torch.stack([torch.arange(30) // size for size in (11, 17, 30)])
    spec = f"{spec}+window(size=3,first=2)+documents"
    positions = awake(StackPositions(spec, 16, 2, 40, causal=True)).double().eval()
    layer = awake(SelfAttention(positions)).double().eval()
    x = torch.randn(3, 30, 16, dtype=torch.float64)
    cache, lengths = Cache(), set()
    for step in STEPS:
        known = slice(0, step.stop)
        full = layer(*positions(x[:, known], document_ids=ids[:, known]))[0]
        given = {"past": step.start, "document_ids": ids[:, known]}
        attended = layer(*positions(x[:, step], **given), cache)[0]
        torch.testing.assert_close(attended, full[:, step], rtol=1e-11, atol=1e-11)
        order = torch.tensor([2, 0, 1] if step.start else [0, 2, 1])
        cache.reorder(order)
        x, ids = x[order], ids[order]
        lengths.add(cache.kept.key.size(2))
    assert max(lengths) <= 3 * 2 + 2


def test_a_cache_without_the_first_keys_is_refused():
    positions = StackPositions("rope+window(size=3,first=2)", 16, 2, 40, causal=True)
    layer, cache = SelfAttention(positions), Cache()
    x = torch.randn(1, 12, 16)
    layer(*positions(x[:, :11]), cache)
    other = torch.arange(12).roll(5)[None]  # the caller's ids say that other tokens were first
    with pytest.raises(UserError, match="lacks 2 of the first keys that these positions need"):
        layer(*positions(x[:, 11:], past=11, position_ids=other), cache)


@pytest.mark.parametrize(
    ("spec", "limits", "dtype"),
    product_of(
        ["none", "t5", "rope", "m4m", "deberta_v2"],
        ["window(size=40)", "chunk(size=50)"],
        [torch.float16, torch.bfloat16],
    ),
)
def test_half_precision_is_close_to_float64(spec, limits, dtype):
    attention = make(f"{spec}+{limits}", "lr").to(dtype).double()
    x = torch.randn(200, 2, 16).to(dtype)
    exact, _ = attention(x.double(), None, None)
    half, _ = attention.to(dtype)(x, None, None)
    error = (half.double() - exact).abs().max() / exact.abs().max()
    assert error < {torch.float16: 8e-3, torch.bfloat16: 6e-2}[dtype]


def test_dropout_drops_the_same_weights_in_the_backward_pass():
    """The output is linear in the values, with the weights that were left."""
    query, key = torch.randn(2, 1, 2, 300, 8)
    value = torch.randn(1, 2, 300, 8, requires_grad=True)
    mask = Mask("lr", window=64)
    out = blocked.attend(AttentionCall(query, key, value, Terms(), mask, dropout=0.3))[0]
    (grad,) = torch.autograd.grad(out, value, out.detach())
    torch.testing.assert_close((grad * value).sum(), out.square().sum(), rtol=1e-4, atol=1e-4)
