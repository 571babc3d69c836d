"""The Triton kernels equal the equation in float64: on a GPU if there is one, else interpreted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fairseq_posenc import registry
from fairseq_posenc.api import SelfAttention, StackPositions
from fairseq_posenc.backends import blocked, equation, reference
from fairseq_posenc.backends import triton as backend
from fairseq_posenc.backends.base import AttentionCall
from fairseq_posenc.encodings.runs import Runs
from fairseq_posenc.encodings.terms import Terms
from fairseq_posenc.errors import UserError
from fairseq_posenc.mask import DIRECTIONS, Mask, PassCache
from tests.helpers.products import WHOLE, product_of, some_of
from tests.helpers.terms import Inputs, leaves_of, terms_of, terms_of_groups
from tests.helpers.triton_kernels import DEVICE, import_kernels, interpret

(attention,) = import_kernels("attention")

H, D = 2, 8
FORMS = {  # products have a scale: without, rounding alone changes gradients by 6e-5
    "plain": {},
    "bias": {"bias": H},
    "gain": {"gain": 1},
    "query table": {"query_table": H},
    "key table": {"key_table": H},
    "two tables": {"query_table": H, "key_table": 1, "bias": 1, "scale_factor": 3.0},
    "product": {"query_table": 1, "key_table": 1, "product": True, "scale_factor": 16.0},
    "one table": {"query_table": 1, "shared": True, "product": True, "scale_factor": 16.0},
}
EVERYTHING = {"query_table": 1, "key_table": H, "gain": H, "bias": 1}
CLIPPED = range(-2, 4)
STARTS = {"clipped": CLIPPED, "buckets": (-20, -9, -4, -1, 0, 1, 2, 5, 9), "one row": ()}
SEGMENTS = torch.tensor([[0] * 9 + [1] * 3 + [2] * 6, [0] * 16 + [3] * 2], device=DEVICE)
LIMITS = {
    "window": Mask("both", window=8),
    "causal window": Mask("lr", window=5),
    "documents": Mask("both", segments=SEGMENTS, documents=True),
    "causal window in documents": Mask("lr", window=5, segments=SEGMENTS, documents=True),
}
COMPOSITIONS = ["shaw+alibi", "transformer_xl+alibi", "m2+shaw", "m4m(max_distance=3)+rope"]
COMPOSITIONS += ["shaw(max_distance=2)", "rope+window(size=4)", "deberta_v2+window(size=4)"]
REFUSED = {
    "cope": "counted positions depend on all scores",
    **dict.fromkeys(("fire", "tupe", "tupe_shared"), "a bias for each pair of tokens"),
    "fox": "no decay",
    "inkling": "do not read states",
    "m3": "a gain for each channel",
    "pope": "have one width",
    "shaw_values": "add no rows to the values",
}


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch):
    interpret(monkeypatch)


def make_terms(form: dict, tgt_len: int, src_len: int, starts: Any = None) -> Terms:
    """Return random terms of a form: a number stands for a table with so many groups of heads.

    ``starts`` are the runs of its vector tables; by default they have a row for each distance.
    """
    bounds = (1 - src_len, tgt_len - 1, torch.device(DEVICE))
    runs = None if starts is None else Runs(starts, *bounds).trim()[1]
    return terms_of_groups(form, tgt_len + src_len - 1, D, leaf, runs)


def leaf(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*size, dtype=dtype, device=DEVICE, requires_grad=True)


def inputs(batch: int, tgt_len: int, src_len: int, width: int = D) -> Inputs:
    query, key, value = (leaf(batch, H, n, width) for n in (tgt_len, src_len, src_len))
    return query, key, value


def all_leaves(qkv: Inputs, terms: Terms) -> list[torch.Tensor]:
    return [*(x for x in qkv if x.requires_grad), *leaves_of(terms)]


def padding(side: str, batch: int, length: int) -> torch.Tensor:
    mask = torch.zeros(batch, length, dtype=torch.bool, device=DEVICE)
    mask[-1, slice(2) if side == "left" else slice(-3, None)] = True
    return mask


def in_float64(qkv: Inputs, terms: Terms) -> tuple[Inputs, Terms]:
    """Return copies in float64; a tensor that two fields hold is copied once."""
    copies: dict[int, torch.Tensor] = {}

    def copy(x):
        return copies.setdefault(id(x), x.detach().double().requires_grad_(x.requires_grad))

    return (copy(qkv[0]), copy(qkv[1]), copy(qkv[2])), terms.map(copy)


def assert_equals_the_equation(
    qkv: Inputs, terms: Terms, mask: Mask, output_error: float = 1e-5, gradient_error: float = 6e-5
) -> None:
    """Errors are relative to the largest number of a tensor, or to 0.1 of that of all gradients."""
    ours, _ = backend.attend(AttentionCall(*qkv, terms, mask))
    exact_qkv, exact_terms = in_float64(qkv, terms)
    exact, _ = reference.attend(AttentionCall(*exact_qkv, exact_terms, mask))
    assert (ours - exact).abs().max() <= output_error * exact.abs().max()
    weight = torch.randn_like(ours)
    leaves, exact_leaves = all_leaves(qkv, terms), all_leaves(exact_qkv, exact_terms)
    found = torch.autograd.grad((ours * weight).sum(), leaves)
    expected = torch.autograd.grad((exact * weight).sum(), exact_leaves)
    largest = max(x.abs().max() for x in expected)
    for our, their, leaf_ in zip(found, expected, leaves, strict=True):
        assert our.dtype == leaf_.dtype
        assert (our - their).abs().max() <= gradient_error * max(their.abs().max(), 0.1 * largest)


@pytest.mark.parametrize("spec", [*registry.names(), *COMPOSITIONS])
def test_every_encoding_equals_the_reference_or_is_refused(spec):
    causal = spec in registry.names() and spec not in registry.names(encoder=True)
    length = 37 if WHOLE else 9
    positions = StackPositions(spec, 2 * D, H, max_positions=length, causal=causal).to(DEVICE)
    x = torch.randn(1, length, 2 * D, device=DEVICE)
    if spec in REFUSED:
        with pytest.raises(UserError, match=f"triton cannot compute this: .*{REFUSED[spec]}"):
            SelfAttention(positions, backend="triton").to(DEVICE)(*positions(x))
        return
    layer = SelfAttention(positions, backend="triton").to(DEVICE)
    modules = torch.nn.ModuleList([positions, layer])
    for parameter in modules.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)

    def gradients(backend: str, dtype: torch.dtype) -> list[torch.Tensor]:
        layer.backend = backend
        leaves = [x.to(dtype).requires_grad_(), *modules.to(dtype).parameters()]
        out, _ = layer(*positions(leaves[0]))
        return [out, *torch.autograd.grad(out.square().sum(), leaves, materialize_grads=True)]

    exact = gradients("reference", torch.float64)
    for ours, theirs in zip(gradients("triton", torch.float32), exact, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("form", "direction", "side"), product_of(FORMS, DIRECTIONS, ["left", "right", None])
)
def test_equals_the_equation(form, direction, side):
    mask = Mask(direction, None if side is None else padding(side, 1, 7))
    assert_equals_the_equation(inputs(1, 7, 7), make_terms(FORMS[form], 7, 7), mask)


@pytest.mark.parametrize(
    ("direction", "sizes", "product"), product_of(DIRECTIONS, ["5 of 37", "1 of 17"], [False, True])
)
def test_queries_are_the_last_tokens(direction, sizes, product):
    tgt_len, src_len = map(int, sizes.split(" of "))
    terms = make_terms({**EVERYTHING, "product": product}, tgt_len, src_len)
    assert_equals_the_equation(inputs(1, tgt_len, src_len), terms, Mask(direction))


@pytest.mark.parametrize(
    ("form", "starts", "direction"),
    product_of(
        ["query table", "key table", "two tables", "product", "one table"],
        ["clipped", "buckets", "one row"],
        ["both", "lr"],
    ),
)
def test_far_tiles_read_the_rows_at_the_ends(form, starts, direction):
    terms = make_terms(FORMS[form], 40, 40, STARTS[starts])
    assert_equals_the_equation(inputs(1, 40, 40), terms, Mask(direction))


@pytest.mark.parametrize("limits", some_of(["causal window in documents"], LIMITS))
def test_limits_hide_keys_and_skip_tiles(limits):
    terms = make_terms(FORMS["product"], 18, 18, CLIPPED)
    assert_equals_the_equation(inputs(2, 18, 18), terms, LIMITS[limits])


def test_layers_of_a_pass_may_have_different_backends():
    """Both keep the ranges of visible keys in the pass's cache."""
    call = AttentionCall(*inputs(2, 18, 18), Terms(), Mask(window=8, cache=PassCache()))
    exact, *others = (x.attend(call)[0] for x in (reference, blocked, backend, blocked))
    for found in others:
        torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-5)


def test_documents_out_of_order_are_refused():
    mask = Mask(segments=SEGMENTS.flip(1), documents=True)
    with pytest.raises(UserError, match="documents whose numbers ascend"):
        backend.attend(AttentionCall(*inputs(2, 18, 18), Terms(), mask))


@pytest.mark.parametrize("tile", some_of([(32, 16)], [(32, 16), (16, 32)]))
def test_tiles_that_are_not_square(tile, monkeypatch):
    monkeypatch.setattr(attention, "INTERPRETED_TILE", attention.Tile(*tile, warps=1))
    terms = make_terms({**EVERYTHING, "product": True}, 34, 34, CLIPPED)
    assert_equals_the_equation(inputs(1, 34, 34), terms, Mask("lr"))


@pytest.mark.parametrize("product", some_of([True], [False, True]))
def test_reads_nothing_that_nobody_wrote(product, monkeypatch):
    """What torch allocates is filled with NaN, and no NaN arrives anywhere."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    terms = make_terms({**EVERYTHING, "product": product}, 5, 18, CLIPPED)
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(1, device=DEVICE).isnan()
        assert_equals_the_equation(inputs(2, 5, 18), terms, Mask("lr", padding("left", 2, 18)))
    finally:
        torch.use_deterministic_algorithms(False)


def test_forbidden_pairs():
    pairs = torch.rand(18, 18, device=DEVICE) < 0.4
    terms = make_terms({"query_table": 1}, 18, 18)
    assert_equals_the_equation(inputs(1, 18, 18), terms, Mask("both", None, pairs))


@pytest.mark.parametrize("width", [5, 40, 64, 128])
def test_any_width_of_heads(width):
    terms = terms_of(query_table=leaf(1, 9, width), key_table=leaf(1, 9, width))
    assert_equals_the_equation(inputs(1, 5, 5, width), terms, Mask("lr"))


def test_a_query_that_sees_no_key_gets_zeros_and_gives_none():
    query, key, value = inputs(1, 7, 7)
    terms = make_terms(EVERYTHING, 7, 7)
    mask = Mask("lr", padding("left", 1, 7))
    out, _ = backend.attend(AttentionCall(query, key, value, terms, mask))
    out.sum().backward()
    assert not out[:, :, :2].any()
    assert not query.grad[:, :, :2].any()
    assert all(x.grad.isfinite().all() for x in all_leaves((query, key, value), terms))


HALVES = [(torch.float16, 2e-3), (torch.bfloat16, 2e-2)]


@pytest.mark.parametrize(("product", "dtype", "error"), product_of([False, True], HALVES))
def test_half_precision_is_close_to_float64(product, dtype, error):
    terms = make_terms({**EVERYTHING, "product": product}, 9, 9, CLIPPED)
    terms = terms.map(lambda x: x.detach().to(dtype).requires_grad_())
    qkv = tuple(leaf(1, H, 9, D, dtype=dtype) for _ in range(3))
    assert_equals_the_equation(qkv, terms, Mask("lr"), error, error)


def test_mixed_precision_takes_tables_of_float32():
    terms = make_terms(EVERYTHING, 7, 7)
    qkv = [x.detach().bfloat16() for x in inputs(1, 7, 7)]
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        ours, _ = backend.attend(AttentionCall(*qkv, terms, Mask("lr")))
        theirs, _ = reference.attend(AttentionCall(*qkv, terms, Mask("lr")))
    assert ours.dtype == torch.bfloat16
    torch.testing.assert_close(ours, theirs, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_no_score_beats_a_mask(dtype):
    """The masked key's score is 90,000, more than fp16 could be filled with."""
    query, key = torch.zeros(2, 1, 1, 2, 4, dtype=dtype, device=DEVICE)
    query[..., 0] = 600
    key[..., 1, 0] = 300
    value = torch.eye(2, 4, dtype=dtype, device=DEVICE)[None, None]
    attended, _ = backend.attend(AttentionCall(query, key, value, Terms(), Mask("lr")))
    assert attended[0, 0, 0].tolist() == [1, 0, 0, 0]


@pytest.fixture(scope="module")
def kept():
    """Find the 64 weights that dropout of 0.1 keeps, for 128 queries: ``(2, 64, 64)`` of 0 or 1."""
    with pytest.MonkeyPatch.context() as patch:
        interpret(patch)
        torch.manual_seed(0)
        zeros = torch.zeros(1, 2, 64, 64, device=DEVICE)
        units = torch.eye(64, device=DEVICE).expand_as(zeros)
        call = AttentionCall(zeros, zeros, units, Terms(), Mask(), dropout=0.1)
        return backend.attend(call)[0][0] * 64 * 0.9


def test_dropout_keeps_the_rate_and_the_mean(kept):
    assert kept.sum(-1).mean().item() == pytest.approx(57.6, abs=0.8)
    assert kept.sum(-1).var().item() == pytest.approx(64 * 0.9 * 0.1, rel=0.4)


def test_dropout_of_one_query_or_key_tells_nothing_of_another(kept):
    assert not torch.equal(kept[0], kept[1])
    for weights in (kept, kept.transpose(1, 2)):
        correlations = torch.corrcoef(weights.flatten(0, 1).cpu()) - torch.eye(128)
        assert correlations.std() < 0.15  # of independent weights, it is 1 / 8


@pytest.mark.parametrize("tile", [(16, 16), (32, 32)])
def test_dropout_is_the_same_backward_and_in_tiles_of_any_size(tile, monkeypatch):
    """Values that are unit vectors show the weights, and so which of them are kept."""
    query, key, value = (leaf(1, H, 20, 24) for _ in range(3))
    terms = terms_of(query_table=leaf(1, 39, 24), key_table=leaf(H, 39, 24))
    torch.manual_seed(3)
    units = torch.eye(20, 24, device=DEVICE).expand_as(value)
    weights, _ = backend.attend(AttentionCall(query, key, units, terms, Mask("lr"), dropout=0.3))
    monkeypatch.setattr(attention, "INTERPRETED_TILE", attention.Tile(*tile, warps=1))
    torch.manual_seed(3)
    ours, _ = backend.attend(AttentionCall(query, key, value, terms, Mask("lr"), dropout=0.3))
    hidden = Mask("lr").forbidden(20, 20, query.device)
    plain = equation.softmax(reference.scores(query, key, terms), hidden)
    theirs = plain * weights[..., :20].ne(0) / 0.7 @ value
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    leaves = all_leaves((query, key, value), terms)
    found, expected = (torch.autograd.grad(x.square().sum(), leaves) for x in (ours, theirs))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_the_same_seed_gives_the_same_bits():
    """Nothing is added up by whoever comes first: no atomic operations."""
    batch = 2 if DEVICE == "cuda" else 1  # which takes seconds to interpret
    qkv, terms = inputs(batch, 17, 17), make_terms(EVERYTHING, 17, 17)

    def once():
        torch.manual_seed(3)
        out, _ = backend.attend(AttentionCall(*qkv, terms, Mask("lr"), dropout=0.2))
        return [out, *torch.autograd.grad(out.square().sum(), all_leaves(qkv, terms))]

    assert all(torch.equal(ours, theirs) for ours, theirs in zip(once(), once()))


# A sequence has 5 tiles of 16 x 32 numbers, so a slab takes 3 of the 4 sequences, or one.
@pytest.mark.parametrize("numbers", some_of([3 * 5 * 512], [3 * 5 * 512, 1]))
def test_slabs_of_any_size(numbers, monkeypatch):
    monkeypatch.setattr(attention, "MAX_BYTES", 4 * numbers)
    mask = Mask("lr", padding("left", 2, 18))
    terms = make_terms({**EVERYTHING, "product": True}, 5, 18, CLIPPED)
    assert_equals_the_equation(inputs(2, 5, 18), terms, mask)


@pytest.mark.parametrize("trained", ["query_table", "bias", None])
def test_frozen_tables_cost_nothing_and_get_nothing(trained, monkeypatch):
    frozen = make_terms({"query_table": 1, "bias": 1}, 7, 7)
    tables = {term.name: term.table.detach() for term in frozen}
    if trained is None:
        monkeypatch.setattr(attention, "tables_kernel", None)
    else:
        tables[trained].requires_grad_()
    assert_equals_the_equation(inputs(1, 7, 7), terms_of(**tables), Mask())
