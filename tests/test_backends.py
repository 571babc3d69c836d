"""Every backend equals the reference: outputs, gradients, dropout; refusals give reasons."""

from __future__ import annotations

import pytest
import torch

from fairseq_posenc.backends import BACKENDS, available, choose
from fairseq_posenc.backends.base import DIRECTIONS, Mask
from fairseq_posenc.encodings.base import Terms
from fairseq_posenc.errors import UserError

B, H, T, D = 3, 2, 7, 8
ROWS = 2 * T - 1
FAST = [name for name in BACKENDS if name != "reference"]


def make_terms() -> dict[str, Terms]:
    """Return terms of every form, with and without a batch or head dimension."""

    def vectors(groups: int = 1) -> torch.Tensor:
        return torch.randn(groups, ROWS, D, requires_grad=True)

    def scalars(groups: int = 1, rows: int = ROWS) -> torch.Tensor:
        return torch.randn(groups, rows, requires_grad=True)

    first = torch.zeros(B, T, dtype=torch.bool)
    first[:2, 0] = True
    first[2, 2] = True
    return {
        "plain": Terms(),
        "scaled": Terms(scale_factor=3.0),
        "bias": Terms(bias=scalars()),
        "bias per head": Terms(bias=scalars(H)),
        "bias by pair": Terms(pair_bias=torch.randn(1, H, T, T, requires_grad=True)),
        "both biases": Terms(
            bias=scalars(), pair_bias=torch.randn(B, 1, T, T, requires_grad=True), scale_factor=2.0
        ),
        "bias with reset": Terms(bias=scalars(1, ROWS + 2), first=first),
        "gain": Terms(gain=scalars()),
        "query table": Terms(query_table=vectors()),
        "two tables": Terms(query_table=vectors(H), key_table=vectors()),
        "product": Terms(query_table=vectors(), key_table=vectors(), product=True),
    }


def masks() -> dict[str, Mask]:
    right, left = torch.zeros(2, B, T, dtype=torch.bool)
    right[1, -3:] = True
    left[2, :2] = True
    pairs = torch.zeros(T, T, dtype=torch.bool)
    pairs[:, 3] = True
    return {
        **{d: Mask(d) for d in DIRECTIONS},
        **{f"{d}, padded on the right": Mask(d, right) for d in DIRECTIONS},
        **{f"{d}, padded on the left": Mask(d, left) for d in DIRECTIONS},
        "pairs": Mask("both", None, pairs),
    }


def inputs(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.randn(B, H, T, D, dtype=dtype, requires_grad=True) for _ in range(3)]


def leaves_of(terms: Terms) -> list[torch.Tensor]:
    return [x for x in terms if isinstance(x, torch.Tensor) and x.requires_grad]


@pytest.mark.parametrize("mask", masks(), ids=lambda name: name)
@pytest.mark.parametrize("form", make_terms(), ids=lambda name: name)
@pytest.mark.parametrize("name", FAST)
def test_equals_the_reference(name, form, mask):
    terms, mask = make_terms()[form], masks()[mask]
    if BACKENDS[name].refuses(terms, need_weights=False):
        with pytest.raises(UserError, match=f"--position-backend {name} cannot compute this"):
            choose(name, terms)
        return
    qkv = inputs()
    ours, _ = BACKENDS[name].attend(*qkv, terms, mask)
    theirs, _ = BACKENDS["reference"].attend(*qkv, terms, mask)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    weight = torch.randn_like(ours)
    leaves = [*qkv, *leaves_of(terms)]
    for our, their in zip(
        torch.autograd.grad((ours * weight).sum(), leaves),
        torch.autograd.grad((theirs * weight).sum(), leaves),
    ):
        torch.testing.assert_close(our, their, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", ["bias", "bias by pair"])
@pytest.mark.parametrize("name", FAST)
def test_gradients_reach_a_bias_alone(name, form):
    """torch's attention once crashed when nothing but the mask needed a gradient."""
    terms = make_terms()[form]
    qkv = [x.detach() for x in inputs()]
    out, _ = BACKENDS[name].attend(*qkv, terms, Mask("lr"))
    out.sum().backward()
    assert all(leaf.grad is not None for leaf in leaves_of(terms))


@pytest.mark.parametrize("name", BACKENDS)
def test_dropout_keeps_the_rate_and_the_mean(name):
    """With equal weights and values of one, an output is the mean of (kept / keep rate)."""
    torch.manual_seed(1)
    zeros, ones = torch.zeros(8, 4, 64, 8), torch.ones(8, 4, 64, 8)
    out, _ = BACKENDS[name].attend(zeros, zeros, ones, Terms(), Mask(), dropout=0.1)
    kept = out * 64 * 0.9  # number of weights kept, of 64, in each of 2,048 rows
    assert kept[..., 0].mean().item() == pytest.approx(57.6, abs=0.25)
    assert kept[..., 0].var().item() == pytest.approx(64 * 0.9 * 0.1, rel=0.25)


@pytest.mark.parametrize("name", BACKENDS)
def test_decoding_step_equals_the_last_row(name):
    query, key, value = (x.detach() for x in inputs())
    full_bias = torch.randn(1, ROWS)
    full, _ = BACKENDS[name].attend(query, key, value, Terms(bias=full_bias), Mask("lr"))
    step, _ = BACKENDS[name].attend(
        query[:, :, -1:], key, value, Terms(bias=full_bias[:, :T]), Mask("lr")
    )
    torch.testing.assert_close(step, full[:, :, -1:], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float16, 5e-3), (torch.bfloat16, 4e-2)])
def test_half_precision_is_close_to_float64(name, dtype, bound):
    qkv = [x.detach().to(dtype) for x in inputs()]
    terms = Terms(bias=torch.randn(H, ROWS).to(dtype))
    exact, _ = BACKENDS["reference"].attend(
        *(x.double() for x in qkv), Terms(bias=terms.bias.double()), Mask("rl")
    )
    half, _ = BACKENDS[name].attend(*qkv, terms, Mask("rl"))
    assert half.dtype == dtype
    assert (half.double() - exact).abs().max() < bound


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_no_score_beats_a_mask(name, dtype):
    """The masked key's score is 90,000, more than fp16 could be filled with."""
    query, key = torch.zeros(2, 1, 1, 2, 4, dtype=dtype)
    query[..., 0] = 600
    key[..., 1, 0] = 300
    value = torch.eye(2, 4, dtype=dtype)[None, None]
    attended, _ = BACKENDS[name].attend(query, key, value, Terms(), Mask("lr", None))
    padded, _ = BACKENDS[name].attend(
        query, key, value, Terms(), Mask("both", torch.tensor([[False, True]]))
    )
    assert attended[0, 0, 0].tolist() == [1, 0, 0, 0]
    assert padded[0, 0, 0].tolist() == [1, 0, 0, 0]


def test_auto_takes_the_fastest_that_can_and_says_why():
    assert choose("auto", Terms()).name == "sdpa"
    plan = choose("auto", make_terms()["product"])
    assert plan.name == "reference"
    assert "not sdpa: the scores are more than a dot product and a bias" in plan.reason


def test_attention_weights_come_from_the_reference_even_if_another_is_required():
    assert choose("sdpa", Terms(), need_weights=True).name == "reference"


def test_unknown_backend_is_an_error_that_lists_the_known():
    with pytest.raises(UserError, match="unknown backend 'fast'; known: auto, sdpa, reference"):
        choose("fast", Terms())


def test_every_backend_says_whether_it_can_run():
    assert set(available()) == set(BACKENDS)
