"""The Triton kernels equal the reference: on a GPU if there is one, else interpreted."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from fairseq_posenc.backends import choose, planner, reference
from fairseq_posenc.backends import triton as backend
from fairseq_posenc.backends.base import AttentionCall, CallFeatures
from fairseq_posenc.backends.mask import DIRECTIONS, Mask
from fairseq_posenc.backends.triton import resets
from fairseq_posenc.encodings.terms import Terms
from tests.helpers.products import product_of
from tests.helpers.tiny_models import logits, make_model, make_tokens

if sys.platform != "linux":
    pytest.skip("triton exists for Linux alone", allow_module_level=True)
if (why := backend.unavailable()).startswith("triton is "):  # too old, with torch 2.6
    pytest.skip(why, allow_module_level=True)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
with pytest.MonkeyPatch.context() as patch:
    if DEVICE == "cpu":
        # Triton reads it when kernels are defined. Other tests, and what they start, must not.
        patch.setenv("TRITON_INTERPRET", "1")
    attention = importlib.import_module("fairseq_posenc.backends.triton.attention")
    sizes = importlib.import_module("fairseq_posenc.backends.triton.sizes")
    gradients = importlib.import_module("fairseq_posenc.backends.triton.gradients")
    tl = importlib.import_module("triton.language")
    interpreter = importlib.import_module("triton.runtime.interpreter")

H, D = 2, 8
FORMS = {
    "plain": {},
    "bias": {"bias": H},
    "gain": {"gain": 1},
    "key table": {"key_table": H},
    "two tables": {"query_table": H, "key_table": 1, "bias": 1, "scale_factor": 3.0},
    "product": {"query_table": 1, "key_table": 1, "product": True},
    "value table": {"query_table": 1, "value_table": H},
}
EVERYTHING = {"query_table": 1, "key_table": H, "value_table": 1, "gain": H, "bias": 1}


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch):
    if DEVICE == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    if DEVICE == "cpu" and hasattr(interpreter, "_LangPatchScope"):  # from Triton 3.6 on
        monkeypatch.setattr(interpreter, "_patch_lang", put_once(interpreter._patch_lang))


def put_once(put):
    """Put the interpreter's functions into place for a kernel, and not again for all it calls."""

    def put_if_not_there(function):
        places = [x for x in (tl, tl.core) if x in function.__globals__.values()]
        is_there = not any(tl.core.is_builtin(place.load) for place in places)
        return interpreter._LangPatchScope() if is_there else put(function)

    return put_if_not_there


def make_terms(form: dict, tgt_len: int, src_len: int, first: torch.Tensor | None = None) -> Terms:
    """Return random terms of a form: a number stands for a table with so many groups of heads."""
    rows = tgt_len + src_len - 1 + (0 if first is None else 2)
    terms: dict[str, Any] = {"first": first}
    for name, value in form.items():
        size = () if name in ("gain", "bias") else (D,)
        is_table = name not in ("product", "scale_factor")
        terms[name] = leaf(value, rows, *size) if is_table else value
    return Terms(**terms)


def leaf(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*size, dtype=dtype, device=DEVICE, requires_grad=True)


Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # query, key and value


def inputs(batch: int, tgt_len: int, src_len: int, heads: int = H) -> Inputs:
    query, key, value = (leaf(batch, heads, n, D) for n in (tgt_len, src_len, src_len))
    return query, key, value


def leaves_of(terms: Terms) -> list[torch.Tensor]:
    return [x for x in terms if isinstance(x, torch.Tensor) and x.requires_grad]


def padding(side: str, batch: int, length: int) -> torch.Tensor:
    mask = torch.zeros(batch, length, dtype=torch.bool, device=DEVICE)
    mask[-1, slice(2) if side == "left" else slice(-3, None)] = True
    return mask


def first_of(padding: torch.Tensor) -> torch.Tensor:
    """Return which token is the first that is not padding, ``(B, S)``."""
    return ~padding & (~padding).cumsum(1).eq(1)


def assert_equals_the_reference(qkv: Inputs, terms: Terms, mask: Mask) -> None:
    ours, _ = backend.attend(AttentionCall(*qkv, terms, mask))
    theirs, _ = reference.attend(AttentionCall(*qkv, terms, mask))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    weight = torch.randn_like(ours)
    leaves = [*qkv, *leaves_of(terms)]
    for our, their in zip(
        torch.autograd.grad((ours * weight).sum(), leaves),
        torch.autograd.grad((theirs * weight).sum(), leaves),
    ):
        torch.testing.assert_close(our, their, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("form", "direction", "side"), product_of(FORMS, DIRECTIONS, ["left", "right"], times=2)
)
def test_equals_the_reference_with_padding(form, direction, side):
    terms = make_terms(FORMS[form], 7, 7)
    assert_equals_the_reference(inputs(1, 7, 7), terms, Mask(direction, padding(side, 1, 7)))


@pytest.mark.parametrize("form", FORMS)
def test_equals_the_reference(form):
    assert_equals_the_reference(inputs(1, 7, 7), make_terms(FORMS[form], 7, 7), Mask())


@pytest.mark.parametrize(
    ("direction", "product"), [("both", False), ("lr", True), ("rl", False), ("rl", True)]
)
def test_reset_with_padding_on_the_left(direction, product):
    mask = Mask(direction, padding("left", 2, 7))
    form = {**EVERYTHING, "product": product}
    terms = make_terms(form, 7, 7, first_of(mask.key_padding))
    assert_equals_the_reference(inputs(2, 7, 7), terms, mask)


def test_reset_that_all_rows_share_with_past_keys():
    terms = make_terms(EVERYTHING, 3, 18, first_of(torch.zeros(1, 18, device=DEVICE).bool()))
    assert_equals_the_reference(inputs(2, 3, 18), terms, Mask("lr"))


@pytest.mark.parametrize(
    ("direction", "tgt_len", "src_len"), product_of(DIRECTIONS, [(20, 20), (5, 37)])
)
def test_many_tiles(direction, tgt_len, src_len):
    """The last tiles are not full, and the queries are the last of the positions."""
    terms = make_terms({**EVERYTHING, "product": True}, tgt_len, src_len)
    assert_equals_the_reference(inputs(1, tgt_len, src_len), terms, Mask(direction))


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_one_query(direction):
    """A single query is the last position: of the later keys it sees itself alone."""
    terms = make_terms({"query_table": 1, "key_table": 1}, 1, 17)
    assert_equals_the_reference(inputs(1, 1, 17), terms, Mask(direction))


@pytest.mark.parametrize(("product", "reset"), [(False, True), (True, False)])
def test_reads_nothing_that_nobody_wrote(product, reset, monkeypatch):
    """What torch allocates is filled with NaN, and no NaN arrives anywhere."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    mask = Mask("lr", padding("left", 2, 18))
    first = first_of(mask.key_padding) if reset else None
    terms = make_terms({**EVERYTHING, "product": product}, 5, 18, first)
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(1, device=DEVICE).isnan()
        assert_equals_the_reference(inputs(2, 5, 18), terms, mask)
    finally:
        torch.use_deterministic_algorithms(False)


def test_forbidden_pairs():
    pairs = torch.rand(18, 18, device=DEVICE) < 0.4
    terms = make_terms({"query_table": 1}, 18, 18)
    assert_equals_the_reference(inputs(1, 18, 18), terms, Mask("both", None, pairs))


@pytest.mark.parametrize("width", [5, 40])
def test_any_width_of_heads(width):
    terms = Terms(query_table=leaf(1, 9, width), value_table=leaf(1, 9, width))
    qkv = [leaf(1, H, 5, width) for _ in range(3)]
    assert_equals_the_reference(qkv, terms, Mask("lr"))


def test_inputs_need_not_be_contiguous():
    qkv = [leaf(7, 1, H, D).permute(1, 2, 0, 3) for _ in range(3)]
    terms = Terms(query_table=leaf(H, D, 20)[..., 4:17].transpose(1, 2))
    ours, _ = backend.attend(AttentionCall(*qkv, terms, Mask()))
    theirs, _ = reference.attend(AttentionCall(*qkv, terms, Mask()))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_a_query_that_sees_no_key_gets_zeros_and_gives_none():
    query, key, value = inputs(1, 7, 7)
    terms = make_terms(EVERYTHING, 7, 7)
    mask = Mask("lr", padding("left", 1, 7))
    out, _ = backend.attend(AttentionCall(query, key, value, terms, mask))
    out.sum().backward()
    assert not out[:, :, :2].any()
    assert not query.grad[:, :, :2].any()
    assert all(x.grad.isfinite().all() for x in (query, key, value, *leaves_of(terms)))


@pytest.mark.parametrize(
    ("product", "reset", "dtype", "bound"),
    product_of(
        [(False, False), (True, False), (True, True)],
        [(torch.float16, 2e-3), (torch.bfloat16, 2e-2)],
    ),
)
def test_half_precision_is_close_to_float64(product, reset, dtype, bound):
    """Errors are relative to the largest number of each tensor.

    In products they are largest where a query sees one key alone: its scores have no gradient.
    """
    first = torch.eye(1, 7, device=DEVICE).bool() if reset else None
    terms = make_terms({**EVERYTHING, "product": product}, 7, 7, first)
    terms = Terms(*(_cast(x, dtype) for x in terms))
    exact_terms = Terms(*(_cast(x, torch.float64) for x in terms))
    qkv = [leaf(1, H, 7, D, dtype=dtype) for _ in range(3)]
    exact_qkv = [_cast(x, torch.float64) for x in qkv]
    half, _ = backend.attend(AttentionCall(*qkv, terms, Mask("lr")))
    exact, _ = reference.attend(AttentionCall(*exact_qkv, exact_terms, Mask("lr")))
    weight = torch.randn_like(half)
    leaves, exact_leaves = [*qkv, *leaves_of(terms)], [*exact_qkv, *leaves_of(exact_terms)]
    ours = [half, *torch.autograd.grad((half * weight).sum(), leaves)]
    theirs = [exact, *torch.autograd.grad((exact * weight).sum(), exact_leaves)]
    for our, leaf_, their in zip(ours, [qkv[0], *leaves], theirs):
        assert our.dtype == leaf_.dtype
        assert (our.double() - their).abs().max() < bound * their.abs().max()


def _cast(x, dtype):
    floats = isinstance(x, torch.Tensor) and x.is_floating_point()
    return x.detach().to(dtype).requires_grad_() if floats else x


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
    """Count the 64 weights that dropout of 0.1 keeps, for 128 queries: ``(2, 64)``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1" if DEVICE == "cpu" else "0")
        torch.manual_seed(0)
        zeros = torch.zeros(1, 2, 64, D, device=DEVICE)
        out, _ = backend.attend(
            AttentionCall(zeros, zeros, zeros + 1, Terms(), Mask(), dropout=0.1)
        )
    return out[0, ..., 0] * 64 * 0.9


def test_dropout_keeps_the_rate_and_the_mean(kept):
    assert kept.mean().item() == pytest.approx(57.6, abs=0.8)
    assert kept.var().item() == pytest.approx(64 * 0.9 * 0.1, rel=0.4)


def test_dropout_differs_between_heads_and_queries(kept):
    assert not torch.equal(kept[0], kept[1])
    assert kept[0].unique().numel() > 3


@pytest.mark.parametrize(("block", "reset"), [(16, False), (32, False), (32, True)])
def test_dropout_is_the_same_backward_and_in_blocks_of_any_size(block, reset, monkeypatch):
    """Values that are unit vectors show the weights, and so which of them are kept."""
    query, key, value = (leaf(1, H, 20, 24) for _ in range(3))
    first = torch.eye(1, 20, device=DEVICE).bool() if reset else None
    rows = 41 if reset else 39
    terms = Terms(query_table=leaf(1, rows, 24), key_table=leaf(H, rows, 24), first=first)
    torch.manual_seed(3)
    units = torch.eye(20, 24, device=DEVICE).expand_as(value)
    weights, _ = backend.attend(AttentionCall(query, key, units, terms, Mask("lr"), dropout=0.3))
    monkeypatch.setattr(sizes, "choose_block_size", lambda dtype: block)
    torch.manual_seed(3)
    ours, _ = backend.attend(AttentionCall(query, key, value, terms, Mask("lr"), dropout=0.3))
    plain = reference.softmax(reference.scores(query, key, terms), Mask("lr"))
    theirs = plain * weights[..., :20].ne(0) / 0.7 @ value
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    leaves = [query, key, value, *leaves_of(terms)]
    for our, their in zip(
        torch.autograd.grad(ours.square().sum(), leaves),
        torch.autograd.grad(theirs.square().sum(), leaves),
    ):
        torch.testing.assert_close(our, their, rtol=1e-4, atol=1e-4)


def test_checkpointing_drops_the_same_weights_again():
    qkv = inputs(1, 7, 7)

    def run(*qkv):
        return backend.attend(AttentionCall(*qkv, Terms(), Mask(), dropout=0.3))[0]

    grads = []
    for call in (run, lambda *qkv: checkpoint(run, *qkv, use_reentrant=False)):
        torch.manual_seed(5)
        grads.append(torch.autograd.grad(call(*qkv).square().sum(), qkv))
    for our, their in zip(*grads):
        assert torch.equal(our, their)


def test_the_same_seed_gives_the_same_bits():
    """Nothing is added up by whoever comes first: no atomic operations."""
    batch = 2 if DEVICE == "cuda" else 1  # which takes seconds to interpret
    qkv, terms = inputs(batch, 17, 17), make_terms(EVERYTHING, 17, 17)
    leaves = [*qkv, *leaves_of(terms)]

    def once():
        torch.manual_seed(3)
        out, _ = backend.attend(AttentionCall(*qkv, terms, Mask("lr"), dropout=0.2))
        return [out, *torch.autograd.grad(out.square().sum(), leaves)]

    assert all(torch.equal(ours, theirs) for ours, theirs in zip(once(), once()))


class Largest(TorchDispatchMode):
    """Notes the size of the largest tensor that any operation returns, single bytes excepted."""

    numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        found = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        sizes = [x.numel() for x in found if x.dtype not in (torch.int8, torch.uint8)]
        self.numbers = max([self.numbers, *sizes])
        return out


def test_nothing_grows_with_the_square_of_the_length(monkeypatch):
    """The backward pass stores tiles, but only so many numbers at a time."""
    monkeypatch.setattr(gradients, "MAX_VALUES", 4_000)
    length = 64 if DEVICE == "cpu" else 256  # tiles of a GPU are larger
    rows = 2 * length - 1
    query, key, value = (leaf(1, 1, length, 4) for _ in range(3))
    terms = Terms(
        query_table=leaf(1, rows, 4), key_table=leaf(1, rows, 4), bias=leaf(1, rows), product=True
    )
    with Largest() as largest:
        out, _ = backend.attend(AttentionCall(query, key, value, terms, Mask("lr"), dropout=0.1))
        out.sum().backward()
    assert rows * 4 <= largest.numbers < length * length


# Of a sequence with 4 tiles of numbers; so a slab takes 3 sequences, one, or some of its keys.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("direction", "product", "numbers"),
    [
        *(("rl", True, 4 * 3 * 4_000), ("both", False, 14_000), ("lr", True, 6_000)),
    ],
)
def test_slabs_of_any_size(direction, product, numbers, monkeypatch):
    monkeypatch.setattr(gradients, "MAX_VALUES", numbers)
    mask = Mask(direction, padding("left", 2, 37))
    form = {**EVERYTHING, "product": product}
    terms = make_terms(form, 20, 37, first_of(mask.key_padding))
    assert_equals_the_reference(inputs(2, 20, 37), terms, mask)


def test_slabs_cover_every_pair_once():
    problem = attention.build_problem(
        attention.Settings(None, None, None, 1.0, "both", product=False, exact=False),
        [torch.zeros(3, H, n, D) for n in (20, 37, 37)] + [None] * 5,
    )
    stored = {"content", "key_term"}
    for numbers in (10**6, 6_000, 2_000, 1):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gradients, "MAX_VALUES", numbers)
            seen = torch.zeros(3 * H, 37)
            for slab in gradients.split_slabs(problem, 16, stored):
                span = slice(slab.layout.start, slab.layout.end)
                seen[slab.sequence : slab.sequence + slab.sequences, span] += 1
            assert seen.eq(1).all()


@pytest.mark.parametrize("length", [512, 2048, 8192])
def test_a_slab_fills_a_gpu_within_its_memory(length):
    problem = attention.build_problem(
        attention.Settings(None, None, None, 1.0, "both", product=True, exact=False),
        [torch.zeros(8, 12, length, 1)] * 3 + [None] * 5,
    )
    stored = {"content", "query_term", "key_term", "weights"}
    slabs = [*gradients.split_slabs(problem, 64, stored)]
    values = [len(stored) * slab.sequences * slab.layout.keys * (length + 2 * 64) for slab in slabs]
    assert max(values) <= gradients.MAX_VALUES
    first = slabs[0]  # the last ones may be smaller
    programs = first.sequences * first.layout.keys // 64
    # A sequence of 8,192 tokens does not fit as a whole: half its keys are almost a GPU's 132.
    assert programs >= (gradients.MIN_PROGRAMS if length < 8192 else 120)


def test_one_table_for_queries_and_keys():
    table = leaf(1, 39, D)
    terms = Terms(query_table=table, key_table=table)
    assert_equals_the_reference(inputs(2, 20, 20), terms, Mask())


@pytest.mark.parametrize("trained", ["query_table", "bias", None])
def test_frozen_tables_cost_nothing_and_get_nothing(trained, monkeypatch):
    frozen = make_terms({"query_table": 1, "bias": 1}, 7, 7)
    terms = Terms(
        **{name: x.detach() for name, x in frozen._asdict().items() if isinstance(x, torch.Tensor)}
    )
    if trained is None:
        monkeypatch.setattr(gradients, "table_kernel", None)
    else:
        getattr(terms, trained).requires_grad_()
    qkv = inputs(1, 7, 7)
    leaves = [*qkv, *leaves_of(terms)]
    out, _ = backend.attend(AttentionCall(*qkv, terms, Mask()))
    theirs, _ = reference.attend(AttentionCall(*qkv, terms, Mask()))
    for our, their in zip(
        torch.autograd.grad(out.square().sum(), leaves),
        torch.autograd.grad(theirs.square().sum(), leaves),
    ):
        torch.testing.assert_close(our, their, rtol=1e-4, atol=1e-4)


REFUSED = {
    "no matrix product computes a gain": Terms(channel_gain=torch.ones(1, 5, D)),
    "not a function of their distance": Terms(pair_bias=torch.ones(1, 1, 3, 3)),
    "states of tokens": Terms(state_table=torch.ones(1, 5, 2), states=torch.ones(1, H, 3, 2)),
    "not been projected": Terms(content_rows=torch.ones(5, H * D)),
}


@pytest.mark.parametrize("why", REFUSED)
def test_refuses_what_it_cannot_compute(why):
    assert why in backend.refuses(REFUSED[why], CallFeatures("cuda"))


def test_refuses_to_return_weights():
    why_not = backend.refuses(Terms(), CallFeatures("cuda", need_weights=True))
    assert why_not == "it does not keep the attention weights"


def test_refuses_float64_and_wide_heads():
    assert "float32 at most, not in torch.float64" in backend.refuses(
        Terms(), CallFeatures("cuda", torch.float64)
    )
    assert "at most 128 wide, not 129" in backend.refuses(
        Terms(), CallFeatures("cuda", head_dim=129)
    )


def test_refuses_a_cpu_unless_interpreted(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert backend.refuses(Terms(), CallFeatures("cpu")) == "it runs on a GPU, not on cpu"


def test_says_why_it_cannot_run_here(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert backend.unavailable() == ""
    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert backend.unavailable() == "there is no CUDA device"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert backend.unavailable() == "the GPU is older than compute capability 8.0"
    with monkeypatch.context() as old:
        old.setattr(backend, "read_version", lambda: "3.2.0")
        assert backend.unavailable() == "triton is 3.2.0, and 3.3 is the oldest that will do"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert backend.unavailable() == "triton is not installed"


TABLE, GAIN = Terms(query_table=torch.ones(1, 1023, 64)), Terms(gain=torch.ones(1, 1023))
PLANS = {
    "won": ("sm_90", TABLE, 2048, "triton", "the fastest in a benchmark on sm_90"),
    "another chip": ("sm_80", TABLE, 512, "reference", "no recorded benchmark for sm_80"),
    "other terms": (
        "sm_90",
        GAIN,
        512,
        "reference",
        "no recorded benchmark of such terms for sm_90",
    ),
    "too short": ("sm_90", TABLE, 1024, "blocked", "benchmark of such a length for sm_90"),
    "too long": ("sm_90", TABLE, 16384, "blocked", "benchmark of such a length for sm_90"),
    "plain": ("sm_90", Terms(), 2048, "sdpa", "a plain dot product"),
}


@pytest.mark.parametrize("case", PLANS)
def test_auto_takes_kernels_that_won_a_recorded_benchmark(case, monkeypatch):
    chip, terms, length, name, reason = PLANS[case]
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # so that it is available
    monkeypatch.setattr(planner, "find_chip", lambda: chip)
    call = CallFeatures("cuda", torch.bfloat16, length, length, dropout=True)
    plan = choose("auto", terms, call)
    assert plan.name == name
    assert reason in plan.reason
    without_dropout = choose("auto", terms, call._replace(dropout=False))
    assert without_dropout.name != "triton"


WITH_TERMS = {  # encodings that the recorded benchmark has
    ("bias",): ["alibi", "t5"],
    ("query_table",): ["shaw"],
    ("key_table", "query_table"): ["deberta"],
}


@pytest.mark.parametrize("names", planner.RECORDED_TERMS, ids=lambda names: " ".join(sorted(names)))
def test_a_recorded_winner_won_its_benchmark(names):
    results = Path(__file__).parents[2] / "docs" / "results"
    figures = json.loads((results / "gpu.json").read_text())["figures"]
    rows = [row for step, rows in figures.items() if step.startswith("layers") for row in rows]
    for encoding in WITH_TERMS[tuple(sorted(names))]:
        seconds = {
            row["backend"]: row["seconds"]
            for row in rows
            if (row["encoding"], row["length"], row["dtype"], row["dropout"] > 0)
            == (encoding, planner.RECORDED_LENGTHS.start, "bfloat16", True)
        }
        assert len(seconds) > 2
        # As fast as the fastest, which may need many times the memory.
        assert seconds["triton"] <= 1.03 * min(seconds.values())


@pytest.mark.parametrize("version", ["3.2.0", "2.1.0+git1"])
def test_an_old_triton_is_named_and_does_without(version, monkeypatch):
    monkeypatch.setattr(backend, "read_version", lambda: version)
    why_not = backend.unavailable()
    assert why_not == f"triton is {version}, and 3.3 is the oldest that will do"
    call = CallFeatures("cuda", torch.bfloat16, 2048, 2048, dropout=True)
    monkeypatch.setattr(planner, "find_chip", lambda: "sm_90")
    plan = choose("auto", Terms(query_table=torch.ones(1, 1023, 64)), call)
    assert plan.name == "blocked"
    assert backend.unavailable() in plan.reason


@pytest.mark.parametrize("version", ["3.3.0", "3.10.1", "4.0"])
def test_a_new_triton_will_do(version, monkeypatch):
    monkeypatch.setattr(backend, "read_version", lambda: version)
    assert "triton is" not in backend.unavailable()


COMPILED = {
    "plain": {},
    "bias, no gradient of the rest": {"bias": H},
    "product with a value table": {**EVERYTHING, "product": True},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "reset", "dropout"), product_of(COMPILED, [False, True], [0.0, 0.3])
)
def test_can_be_compiled_as_one_graph(form, reset, dropout):
    """With the forward and the backward pass traced: what "eager" does as well, and more."""
    torch._dynamo.reset()
    mask = Mask("lr", padding("left", 2, 7))
    terms = make_terms(COMPILED[form], 7, 7, first_of(mask.key_padding) if reset else None)
    query, key, value = inputs(2, 7, 7)
    leaves = leaves_of(terms) if "rest" in form else [query, key, value, *leaves_of(terms)]
    if "rest" in form:
        query, key, value = query.detach(), key.detach(), value.detach()

    def run(query, key, value):
        return backend.attend(AttentionCall(query, key, value, terms, mask, dropout))[0]

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    results = []
    for function in (run, compiled):
        torch.manual_seed(3)
        out = function(query, key, value)
        results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    for our, their in zip(*results):
        torch.testing.assert_close(our, their, rtol=1e-6, atol=1e-6)


def test_a_resets_places_are_found_once_a_forward_pass(monkeypatch):
    calls, real = [], resets._find_hidden_key
    monkeypatch.setattr(resets, "_find_hidden_key", lambda *args: calls.append(1) or real(*args))
    model = make_model("masked_lm", position_encoding="m4+reset", position_backend="triton")
    logits(model.to(DEVICE), "masked_lm", make_tokens().to(DEVICE))
    assert len(calls) == 1
