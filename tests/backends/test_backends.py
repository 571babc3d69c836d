"""Every backend equals the reference: outputs, gradients, dropout; refusals give reasons."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from fairseq_posenc import registry
from fairseq_posenc.api import SelfAttention, StackPositions
from fairseq_posenc.backends import BACKENDS, available, blocked, check, choose
from fairseq_posenc.backends.base import AttentionCall
from fairseq_posenc.backends.blocked import dropout as hashed
from fairseq_posenc.backends.blocked import geometry
from fairseq_posenc.encodings.runs import Runs
from fairseq_posenc.encodings.term import NumbersByPair
from fairseq_posenc.encodings.terms import Terms
from fairseq_posenc.errors import UserError
from fairseq_posenc.mask import DIRECTIONS, Mask, PassCache
from tests.helpers.formulas import padding_of
from tests.helpers.products import product_of
from tests.helpers.terms import (
    Inputs,
    assert_equals_reference,
    change_terms,
    draft_call,
    leaves_of,
    terms_of,
    with_tensors,
)
from tests.helpers.tiny_models import logits, make_model, make_tokens

B, H, T, D = 3, 2, 37, 4
ROWS = 2 * T - 1
# Compiled kernels have tests of their own.
HERE = [name for name in BACKENDS if name not in ("flex", "triton")]
FAST = [name for name in HERE if name != "reference"]


@pytest.fixture(autouse=True)
def _several_blocks(monkeypatch):
    """Make blocks so small that a call has several, and the last of them is not full."""
    monkeypatch.setattr(geometry, "MAX_QUERIES", 16)
    monkeypatch.setattr(geometry, "FEW_QUERIES", 16)
    monkeypatch.setattr(geometry, "PAIRS_PER_THREAD", 16 * 48)


# Terms of every form, with and without a batch or head dimension: the groups of heads of tables.
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scaled": {"scale_factor": 1 / 16},  # a scale of 2
    "bias": {"bias": 1},
    "bias per head": {"bias": H},
    "bias by pair": {"pair_bias": (1, H)},
    "both biases": {"bias": 1, "pair_bias": (B, 1), "scale_factor": 2.0},
    "states": {"state_table": 1, "states": H, "scale_factor": 2.0},
    "states per head": {"state_table": H, "states": H, "bias": 1},
    "states and all": dict(
        gain=1, query_table=1, key_table=H, state_table=1, states=H, pair_bias=(B, 1)
    ),
    "states beside a product": {"query_table": 1, "state_table": 1, "states": H, "product": True},
    "gain": {"gain": 1},
    "gain per head": {"gain": H},
    "query table": {"query_table": 1},
    "key table": {"key_table": 1, "scale_factor": 2.0},
    "two tables": {"query_table": H, "key_table": 1},
    "key table per head": {"query_table": 1, "key_table": H},
    "product": {"query_table": 1, "key_table": 1, "product": True},
    "product of two": {"query_table": 1, "product": True, "scale_factor": 2.0},
    "product of all": {"gain": 1, "bias": H, "query_table": 1, "key_table": H, "product": True},
    "values": {"value_table": 1},
    "values per head": {"value_table": H, "query_table": 1},
    "bias with reset": {"bias": 1, "reset": True},
    "product with reset": {"query_table": 1, "key_table": 1, "product": True, "reset": True},
    "all with reset": dict(gain=H, bias=1, query_table=H, key_table=1, reset=True),
}


def make_terms(rows: int = ROWS, dtype: torch.dtype = torch.float32) -> dict[str, Terms]:
    """Return the terms of each form."""
    queries = rows + 1 - T
    first = torch.zeros(B, T, dtype=torch.bool)
    first[[0, 1, 2], [0, 0, 2]] = True

    def draw(name: str, groups: Any, resets: int) -> Any:
        vectors, numbers = ("query_table", "key_table", "value_table"), ("bias", "gain")
        sizes: dict[str, Any] = dict.fromkeys(vectors, (groups, rows + resets, D))
        sizes |= dict.fromkeys(numbers, (groups, rows + resets))
        sizes |= {"state_table": (groups, rows, 3), "states": (B, groups, queries, 3)}
        sizes["pair_bias"] = (*groups, queries, T) if isinstance(groups, tuple) else None
        if name not in sizes:
            return first if name == "reset" else groups
        return torch.randn(sizes[name], dtype=dtype, requires_grad=True)

    return {
        form: terms_of(**{x: draw(x, y, 2 * ("reset" in given)) for x, y in given.items()})
        for form, given in FORMS.items()
    }


def masks() -> dict[str, Mask]:
    right, left = padding_of(T, 0, -3, 0), padding_of(T, 0, 0, 2)
    pairs = torch.zeros(T, T, dtype=torch.bool)
    pairs[:, 3] = True
    return {
        **{d: Mask(d) for d in DIRECTIONS},
        **{f"{d}, padded on the right": Mask(d, right) for d in DIRECTIONS},
        **{f"{d}, padded on the left": Mask(d, left) for d in DIRECTIONS},
        "a sentence of padding": Mask("both", padding_of(T, T, 0, 2)),
        "pairs": Mask("both", None, pairs),
    }


def inputs(dtype: torch.dtype = torch.float32, tgt_len: int = T) -> Inputs:
    lengths = (tgt_len, T, T)
    query, key, value = (torch.randn(B, H, n, D, dtype=dtype, requires_grad=True) for n in lengths)
    return query, key, value


@pytest.mark.parametrize(
    ("name", "form", "mask"),
    [
        *itertools.product(["blocked"], make_terms(), masks()),
        *product_of([name for name in FAST if name != "blocked"], make_terms(), masks()),
    ],
)
def test_equals_the_reference(name, form, mask):
    terms, mask = make_terms(dtype=torch.float64)[form], masks()[mask]
    if BACKENDS[name].refuses(draft_call(terms)):
        with pytest.raises(UserError, match=f"position backend {name} cannot compute this"):
            check(name, terms, D)
        return
    assert_equals_reference(name, terms, mask, inputs(torch.float64))


@pytest.mark.parametrize(
    ("form", "tgt_len", "saved"), product_of(make_terms(), [1, 5], [0, 10**9], times=2)
)
def test_blocked_serves_the_last_queries_of_many_keys(form, tgt_len, saved, monkeypatch):
    monkeypatch.setattr(blocked, "SAVED_BYTES", saved)
    terms = make_terms(tgt_len + T - 1, torch.float64)[form]
    if (by_pair := terms.find(NumbersByPair)) is not None:
        pair_bias = by_pair.numbers.detach()[:, :, -tgt_len:].requires_grad_()
        terms = change_terms(terms, pair_bias=pair_bias)
    for mask in (Mask("lr"), Mask("both", masks()["both, padded on the left"].key_padding)):
        assert_equals_reference("blocked", terms, mask, inputs(torch.float64, tgt_len))


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_blocked_serves_a_reset_beside_all_else(direction):
    """With first tokens in the middle, a window, first keys, segments, and forbidden pairs."""
    torch.manual_seed(0)
    forms = make_terms(dtype=torch.float64)

    def leaf(*size: int) -> torch.Tensor:
        return torch.randn(size, dtype=torch.float64, requires_grad=True)

    first = torch.zeros(B, T, dtype=torch.bool)
    first[1, 20] = first[2, 2] = True
    terms = change_terms(
        forms["all with reset"],
        reset=first,
        pair_bias=leaf(B, 1, T, T),
        decay=(leaf(B, H, T, 2), leaf(1, H, T, 2) if direction == "both" else None),
        temperature=leaf(B, 1, T),
        count_temperature=leaf(H),
        sink=leaf(H),
        softcap=7.0,
    )
    segments = (torch.arange(T) // 30).expand(B, T)
    first_keys = torch.arange(T).eq(4).expand(B, T)
    pairs = torch.zeros(T, T, dtype=torch.bool)
    pairs[:, 3] = pairs[23, 20] = pairs[20, 24] = True
    padding = masks()["both, padded on the left"].key_padding
    limits = Mask(window=9, segments=segments, first_keys=first_keys)
    assert_equals_reference("blocked", terms, Mask(direction), inputs(torch.float64))
    mask = Mask(direction, padding, pairs) & limits
    assert_equals_reference("blocked", terms, mask, inputs(torch.float64))


def test_blocked_gradients_reach_operands_whose_heads_are_not_before_their_tokens(monkeypatch):
    """A chunk of zeros with such strides is a copy, and gradients added to a copy are lost."""
    monkeypatch.undo()  # with one chunk for all sentences
    tokens = 16  # whole tiles: padding would make the operands contiguous
    shape = (B, H, tokens, D)
    qkv = tuple(torch.randn(shape, dtype=torch.float64, requires_grad=True) for _ in range(3))
    by_token = [
        torch.randn(B, tokens, H, width, dtype=torch.float64, requires_grad=True)
        for width in (1, 2, 3)
    ]
    temperature, decay, states = (x.transpose(1, 2) for x in by_token)
    table = torch.randn(1, 2 * tokens - 1, 3, dtype=torch.float64)
    terms = terms_of(temperature=temperature[..., 0], decay=decay, states=states, state_table=table)
    assert_equals_reference("blocked", terms, Mask("lr"), qkv)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("spec", registry.names())
@pytest.mark.parametrize("name", ["sdpa", "blocked"])
def test_layers_learn_at_lengths_that_fill_tiles(name, spec, causal, monkeypatch):
    """There nothing is padded, so operands come with the strides that a layer gives them."""
    monkeypatch.undo()  # blocks of the usual size
    if not causal and spec not in registry.names(encoder=True):
        return
    positions = StackPositions(spec, embed_dim=8, num_heads=2, causal=causal).double()
    layer = SelfAttention(positions).double()
    try:
        SelfAttention(positions, backend=name)
    except UserError:  # the backend does not serve it
        return
    learned = [*positions.parameters(), *layer.parameters()]
    for parameter in learned:
        parameter.data += 0.1 * torch.randn_like(parameter)
    x = torch.randn(2, 32, 8, dtype=torch.float64, requires_grad=True)

    def gradients(backend):
        layer.backend = backend
        out, _ = layer(*positions(x))
        return torch.autograd.grad(out.square().sum(), [x, *learned], allow_unused=True)

    torch.testing.assert_close(gradients(name), gradients("reference"), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("groups", [1, H])
def test_blocked_serves_a_gain_of_channels_for_one_query(groups):
    gain = torch.randn(groups, T, D, dtype=torch.float64, requires_grad=True)
    terms = terms_of(channel_gain=gain)
    assert BACKENDS["blocked"].refuses(draft_call(terms, tgt_len=1)) == ""
    assert_equals_reference("blocked", terms, Mask("lr"), inputs(torch.float64, 1))


@pytest.mark.parametrize("form", make_terms(), ids=lambda name: name)
@pytest.mark.parametrize("name", FAST)
def test_float32_is_close_to_the_reference(name, form):
    terms, mask = make_terms()[form], Mask("lr", masks()["lr, padded on the right"].key_padding)
    if BACKENDS[name].refuses(draft_call(terms)):
        return  # shown above to be refused
    assert_equals_reference(name, terms, mask, inputs(), 1e-5)


@pytest.mark.parametrize("form", ["bias", "bias by pair"])
@pytest.mark.parametrize("name", FAST)
def test_gradients_reach_a_bias_alone(name, form):
    """torch's attention once crashed when nothing but the mask needed a gradient."""
    terms = make_terms()[form]
    qkv = [x.detach() for x in inputs()]
    out, _ = BACKENDS[name].attend(AttentionCall(*qkv, terms, Mask("lr")))
    out.sum().backward()
    assert all(leaf.grad is not None for leaf in leaves_of(terms))


@pytest.mark.parametrize("name", HERE)
def test_dropout_keeps_the_rate_and_the_mean(name):
    """With equal weights and values of one, an output is the mean of (kept / keep rate)."""
    torch.manual_seed(1)
    zeros, ones = torch.zeros(8, 4, 64, 8), torch.ones(8, 4, 64, 8)
    out, _ = BACKENDS[name].attend(AttentionCall(zeros, zeros, ones, Terms(), Mask(), dropout=0.1))
    kept = out * 64 * 0.9  # number of weights kept, of 64, in each of 2,048 rows
    assert kept[..., 0].mean().item() == pytest.approx(57.6, abs=0.25)
    assert kept[..., 0].var().item() == pytest.approx(64 * 0.9 * 0.1, rel=0.25)


def test_what_layers_share_is_made_again_for_other_things():
    mask, equal = Mask(cache=PassCache()), torch.ones(2)
    bias = torch.ones(2, requires_grad=True)
    given = [(bias, 3), (bias, 3), (bias, 4), (equal, 4), (None, 4), (equal, 4), (equal, 4)]
    made = [mask.cached("doubled", (x, n), lambda: object()) for x, n in given]
    assert [ours is theirs for ours, theirs in zip(made, made[1:])] == [
        *(True, False, False, False, False, True)
    ]
    with torch.no_grad():  # as a layer that is run again with gradients finds it
        without = mask.cached("doubled", (bias, 3), lambda: bias * 2)
    assert mask.cached("doubled", (bias, 3), lambda: bias * 2).requires_grad
    assert not without.requires_grad


@pytest.mark.parametrize("form", ["bias per head", "product of all", "all with reset"])
@pytest.mark.parametrize("name", HERE)
def test_the_same_seed_gives_the_same_bits(name, form):
    terms, mask = make_terms()[form], masks()["lr, padded on the left"]
    if BACKENDS[name].refuses(draft_call(terms)):
        return
    qkv = inputs()

    def once():
        torch.manual_seed(3)
        out, _ = BACKENDS[name].attend(AttentionCall(*qkv, terms, mask, dropout=0.2))
        return [out, *torch.autograd.grad(out.square().sum(), [*qkv, *leaves_of(terms)])]

    assert all(torch.equal(ours, theirs) for ours, theirs in zip(once(), once()))


@pytest.mark.parametrize("spec", ["t5", "shaw+shaw_values"])
@pytest.mark.parametrize("name", HERE)
def test_the_same_seed_trains_the_same_weights(name, spec):
    """Dropout and padding included, for five updates."""
    if spec != "t5" and BACKENDS[name].refuses(draft_call(make_terms()["two tables"])):
        return
    rates = {"dropout": 0.1, "attention_dropout": 0.1}
    tokens = make_tokens(4, 12, padding=3)

    def trained():
        torch.manual_seed(3)
        model = make_model("masked_lm", position_encoding=spec, position_backend=name, **rates)
        optimizer = torch.optim.Adam(model.train().parameters(), lr=1e-2)
        for _ in range(5):
            optimizer.zero_grad()
            logits(model, "masked_lm", tokens).logsumexp(-1).sum().backward()
            optimizer.step()
        return [parameter.detach() for parameter in model.parameters()]

    assert all(torch.equal(ours, theirs) for ours, theirs in zip(trained(), trained()))


@pytest.mark.parametrize("name", HERE)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float16, 5e-3), (torch.bfloat16, 4e-2)])
def test_half_precision_is_close_to_float64(name, dtype, bound):
    qkv = [x.detach().to(dtype) for x in inputs()]
    terms = terms_of(bias=torch.randn(H, ROWS).to(dtype))
    precise = AttentionCall(*(x.double() for x in qkv), terms.map(torch.Tensor.double), Mask("rl"))
    exact, _ = BACKENDS["reference"].attend(precise)
    half, _ = BACKENDS[name].attend(AttentionCall(*qkv, terms, Mask("rl")))
    assert half.dtype == dtype
    assert (half.double() - exact).abs().max() < bound


@pytest.mark.parametrize("name", HERE)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("seen", "hidden"), [(0, 300), (-300, 0)])
def test_no_score_beats_a_mask(name, dtype, seen, hidden):
    """The hidden key's score is higher by 90,000, more than fp16 could be filled with."""
    query, key = torch.zeros(2, 1, 1, 2, 4, dtype=dtype)
    query[..., 0] = 600
    key[..., 0, 0] = seen
    key[..., 1, 0] = hidden
    value = torch.eye(2, 4, dtype=dtype)[None, None]
    attended, _ = BACKENDS[name].attend(AttentionCall(query, key, value, Terms(), Mask("lr", None)))
    mask = Mask("both", torch.tensor([[False, True]]))
    padded, _ = BACKENDS[name].attend(AttentionCall(query, key, value, Terms(), mask))
    assert attended[0, 0, 0].tolist() == [1, 0, 0, 0]
    assert padded[0, 0, 0].tolist() == [1, 0, 0, 0]


def test_dropout_is_drawn_again_in_the_backward_pass(monkeypatch):
    """The gradient is that of a function that drops the same weights, saved or computed again."""
    terms = make_terms(dtype=torch.float64)["product with reset"]
    leaves = [*inputs(torch.float64), *leaves_of(terms)]
    for saved in (0, 10**9):
        monkeypatch.setattr(blocked, "SAVED_BYTES", saved)

        def attend(
            query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *tables: torch.Tensor
        ) -> torch.Tensor:
            torch.manual_seed(1)
            first = [x for x in terms.tensors().values() if not x.requires_grad]
            given = with_tensors(terms, [*tables, *first])
            return BACKENDS["blocked"].attend(
                AttentionCall(query, key, value, given, Mask("lr"), dropout=0.3)
            )[0]

        assert torch.autograd.gradcheck(attend, leaves, fast_mode=True)


def test_activation_checkpointing_drops_the_same_weights():
    qkv = inputs()
    terms = make_terms()["two tables"]
    leaves = [*qkv, *leaves_of(terms)]

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return BACKENDS["blocked"].attend(
            AttentionCall(query, key, value, terms, Mask(), dropout=0.5)
        )[0]

    found = []
    for run in (attend, lambda *qkv: checkpoint(attend, *qkv, use_reentrant=False)):
        torch.manual_seed(1)
        found.append(torch.autograd.grad(run(*qkv).square().sum(), leaves))
    torch.testing.assert_close(*found, rtol=0, atol=0)


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5, 0.9])
def test_hashed_dropout_is_independent_from_pair_to_pair(rate):
    """Counts, and products of rows and of columns, spread as those of independent draws do."""
    device = torch.device("cpu")
    queries = hashed.draw_seeds(2, 8, 256, device=device)
    keys = hashed.draw_seeds(8, 256, device=device)
    weights = hashed.mark_dropped(torch.ones(8, 256, 256), rate, queries, keys)
    assert set(weights.unique().tolist()) == {-1, 1}
    z = ((weights < 0).double() - rate) / (rate * (1 - rate)) ** 0.5
    assert abs(z.mean()) * z.numel() ** 0.5 < 4
    for sums in (z.sum(1), z.sum(2)):
        assert (sums / 16).var().item() == pytest.approx(1, abs=0.15)
    others = ~torch.eye(256, dtype=torch.bool)
    for products in (z @ z.transpose(1, 2), z.transpose(1, 2) @ z):
        assert (products[:, others] / 16).var().item() == pytest.approx(1, abs=0.05)


def exact_gradients(leaves: list[torch.Tensor], form: str, weight: torch.Tensor):
    """Return the reference's gradients in float64, of the leaves as they are."""
    exact = [x.detach().double().requires_grad_() for x in leaves]
    query, key, value, *tables = exact
    terms = with_tensors(make_terms()[form], tables)
    out, _ = BACKENDS["reference"].attend(AttentionCall(query, key, value, terms, Mask("lr")))
    return torch.autograd.grad((out * weight.double()).sum(), exact)


@pytest.mark.parametrize("form", ["two tables", "product"])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float16, 4e-3), (torch.bfloat16, 2e-2)])
def test_blocked_gradients_in_half_precision_are_close_to_float64(form, dtype, bound):
    """Values with a large common part: the gradients then subtract nearly equal numbers."""
    leaves = [x.detach() for x in (*inputs(), *leaves_of(make_terms()[form]))]
    leaves[2] += 3
    leaves = [x.to(dtype).requires_grad_() for x in leaves]
    terms = with_tensors(make_terms()[form], leaves[3:])
    out, _ = BACKENDS["blocked"].attend(AttentionCall(*leaves[:3], terms, Mask("lr")))
    weight = torch.randn_like(out)
    ours = torch.autograd.grad((out * weight).sum(), leaves)
    for our, exact in zip(ours, exact_gradients(leaves, form, weight)):
        assert (our - exact).norm() < bound * exact.norm()


@pytest.mark.parametrize("form", [*make_terms(), "far keys"])
def test_a_backward_pass_under_autocast_gives_the_same(form):
    rows = [torch.randn(1, 4, D, requires_grad=True) for _ in range(2)]
    far = terms_of(Runs(range(-1, 2), 1 - T, T - 1), query_table=rows[0], key_table=rows[1])
    terms, qkv = {**make_terms(), "far keys": far}[form], inputs()
    leaves = [*qkv, *leaves_of(terms)]
    found = []
    for autocast in (False, True):
        out, _ = BACKENDS["blocked"].attend(AttentionCall(*qkv, terms, Mask("lr")))
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            found.append(torch.autograd.grad(out.sum(), leaves))
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_a_second_backward_pass_over_held_blocks_gives_the_same():
    for form in ("two tables", "product of all", "gain", "all with reset"):
        qkv, terms = inputs(), make_terms()[form]
        leaves = [*qkv, *leaves_of(terms)]
        out, _ = BACKENDS["blocked"].attend(AttentionCall(*qkv, terms, Mask(), dropout=0.1))
        once = torch.autograd.grad(out.sum(), leaves, retain_graph=True)
        torch.testing.assert_close(once, torch.autograd.grad(out.sum(), leaves), rtol=0, atol=0)
    out, _ = BACKENDS["blocked"].attend(AttentionCall(*(x.detach() for x in qkv), Terms(), Mask()))
    assert out.grad_fn is None


def largest_allocation(length: int) -> int:
    """Return the bytes of the largest tensor of a forward and backward pass of a product."""
    q, k, v = (torch.randn(1, 1, length, D, requires_grad=True) for _ in range(3))
    table = torch.randn(1, 2 * length - 1, D, requires_grad=True)
    terms = terms_of(query_table=table, key_table=table, product=True)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        BACKENDS["blocked"].attend(AttentionCall(q, k, v, terms, Mask(), dropout=0.1))[
            0
        ].sum().backward()
    return max([event.cpu_memory_usage for event in seen.events() if event.name == "[memory]"])


def test_no_tensor_of_blocked_grows_with_the_square_of_the_length(monkeypatch):
    monkeypatch.setattr(blocked, "SAVED_BYTES", 0)
    assert largest_allocation(512) < 2.5 * largest_allocation(256)


def plan(terms: Terms, requested: str = "auto", **call: Any) -> str:
    return choose(requested, draft_call(terms, **call))[0]


def test_auto_takes_the_fastest_that_can():
    tables = make_terms()["product"]
    fixed = terms_of(bias=torch.zeros(1, ROWS))
    assert plan(Terms()) == "sdpa"
    assert plan(Terms(), dropout=0.1) == "blocked"
    assert plan(tables) == "blocked"
    assert plan(tables, src_len=20, tgt_len=20) == "reference"
    assert plan(tables, src_len=20, tgt_len=1) == "reference"
    assert plan(tables, src_len=512, tgt_len=1) == "reference"
    assert plan(fixed, src_len=512, tgt_len=1) == "sdpa"
    assert plan(terms_of(channel_gain=torch.ones(1, ROWS, D))) == "reference"
    reset_values = change_terms(make_terms()["bias with reset"], value_table=torch.ones(1, ROWS, D))
    assert plan(reset_values) == "reference"
    assert plan(fixed) == "sdpa"
    assert plan(fixed, mask=Mask(key_padding=torch.zeros(1, 512).bool())) == "blocked"
    assert plan(make_terms()["bias"]) == "blocked"
    assert plan(Terms(), need_weights=True) == "reference"


def test_the_choice_is_logged_with_its_reason_once_for_each_case(caplog):
    terms = terms_of(channel_gain=torch.ones(1, ROWS, D), bias=torch.ones(1, ROWS))
    line = (
        "attention (channel gain, bias; cpu, float64, dropout): reference, "
        "more than a dot product and a bias; not blocked: no matrix product computes a gain for "
        "each channel"
    )
    with caplog.at_level("INFO"):
        for _ in range(3):
            plan(terms, dropout=0.1, dtype=torch.float64)
    assert caplog.messages == [line]


def test_a_requested_backend_is_taken_or_refused():
    tables = make_terms()["product"]
    assert plan(Terms(), "reference", dropout=0.1) == "reference"
    assert plan(tables, "blocked", src_len=8, tgt_len=8) == "blocked"
    assert plan(tables, "blocked", tgt_len=1) == "blocked"  # which leaves it to the reference
    with pytest.raises(UserError, match="position backend sdpa cannot compute this: the scores"):
        plan(tables, "sdpa")


def test_a_backend_that_cannot_run_here_is_refused_with_the_reason(monkeypatch):
    monkeypatch.setattr(BACKENDS["triton"], "unavailable", lambda: "there is no CUDA device")
    with pytest.raises(UserError, match=r"triton cannot compute this: there is no CUDA device"):
        check("triton", Terms(), D)


def test_every_backend_says_whether_it_can_run():
    assert set(available()) == set(BACKENDS)
    assert all(isinstance(reason, str) for reason in available().values())
