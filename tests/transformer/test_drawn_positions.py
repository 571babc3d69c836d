"""Positions that are drawn: order, batches, evaluation, decoding, and what cannot take them."""

from __future__ import annotations

import pytest
import torch

from fairseq_posenc.api import Cache, PositionEncoding, SelfAttention, StackPositions
from fairseq_posenc.errors import UserError
from tests.helpers import oracles
from tests.helpers.formulas import awake
from tests.helpers.tiny_models import logits, make_model, make_tokens

WIDTH, HEADS, HEAD_DIM, ROOM, LIMIT = 16, 2, 8, 20, 90
DRAWN = f"randomized(limit={LIMIT})"
TAKE_IDS = ["rope", "pope", "alibi", "sinusoidal", "learned", "fox", "none"]


def numbers(positions: StackPositions, length: int) -> torch.Tensor:
    """Return the numbers at which tokens stand."""
    drawn = positions(torch.zeros(1, length, WIDTH))[1].positions.drawn
    assert drawn is not None
    return drawn[0]


def test_numbers_are_distinct_and_in_order():
    torch.manual_seed(0)
    positions = StackPositions(f"rope+{DRAWN}", WIDTH, HEADS, ROOM)
    seen = set()
    for _ in range(300):
        now = numbers(positions.train(), ROOM).tolist()
        assert len(now) == ROOM
        assert now == sorted(set(now))
        seen |= set(now)
    assert seen == set(range(LIMIT))


def test_each_batch_of_a_training_draws_anew_and_evaluation_does_not():
    positions = StackPositions(f"rope+{DRAWN}", WIDTH, HEADS, ROOM)
    assert not torch.equal(numbers(positions.train(), ROOM), numbers(positions, ROOM))
    first = numbers(positions.eval(), ROOM)
    assert torch.equal(first, numbers(positions, ROOM))
    again = StackPositions(f"rope+{DRAWN}", WIDTH, HEADS, ROOM).eval()
    assert torch.equal(first, numbers(again, ROOM))
    assert torch.equal(first[:7], numbers(positions, 7))


def test_an_even_evaluation():
    positions = StackPositions(f"rope+{DRAWN[:-1]},evaluation=even)", WIDTH, HEADS, ROOM).eval()
    assert numbers(positions, 4).tolist() == [0, 4, 9, 13]  # of 90 for 20


@pytest.mark.parametrize(
    ("spec", "causal"),
    [(spec, causal) for spec in ("rope", "pope", "alibi") for causal in (True, False)]
    + [("xpos", True)],
)
def test_scores_are_those_of_the_numbers(spec, causal):
    torch.manual_seed(0)
    encoding = awake(PositionEncoding(f"{spec}+{DRAWN}", WIDTH, HEADS, ROOM, causal)).double()
    encoding.eval()
    query, key = torch.randn(2, 2, HEADS, 9, HEAD_DIM, dtype=torch.float64)
    padding = torch.zeros(2, 9, dtype=torch.bool)
    padding[1, :3] = True
    with torch.no_grad():
        ours = encoding.scores(query, key, padding)
    drawn = encoding.shared["randomized"].fixed
    for b, real in enumerate(~padding):
        q, k, places = query[b, :, real], key[b, :, real], drawn[: int(real.sum())]
        visible = torch.ones(len(places), len(places)).tril().bool() if causal else None
        if spec in ("rope", "xpos"):
            rotate = getattr(oracles, spec)
            theirs = oracles.none(rotate(q, places, {}), rotate(k, places, {"keys": True}), {}, {})
        else:
            delta = encoding.layer["pope"].delta.detach() if spec == "pope" else None
            theirs = by_number(q, k, places, delta)
        found = ours[b][:, real][:, :, real]
        if visible is not None:
            found, theirs = found * visible, theirs * visible
        torch.testing.assert_close(found, theirs, rtol=1e-4, atol=1e-5)


def by_number(q, k, places: torch.Tensor, delta: torch.Tensor | None) -> torch.Tensor:
    """Return the scores of alibi, or with delta of pope, pair by pair."""
    found = torch.zeros(HEADS, len(places), len(places), dtype=torch.float64)
    theta = 10000.0 ** (-torch.arange(HEAD_DIM, dtype=torch.float64) / HEAD_DIM)
    slopes = torch.tensor(oracles.alibi_slopes(HEADS), dtype=torch.float64)
    for i, here in enumerate(places.tolist()):
        for j, there in enumerate(places.tolist()):
            if delta is None:
                content = (q[:, i] * k[:, j]).sum(-1) / HEAD_DIM**0.5
                found[:, i, j] = content - slopes * abs(here - there)
            else:
                lengths = torch.log1p(q[:, i].exp()) * torch.log1p(k[:, j].exp())
                turned = ((there - here) * theta + delta.clamp(-2 * torch.pi, 0)).cos()
                found[:, i, j] = (lengths * turned).sum(-1) / HEAD_DIM**0.5
    return found


@pytest.mark.parametrize("spec", TAKE_IDS)
@pytest.mark.parametrize("family", ["causal_lm", "masked_lm", "translation"])
def test_models_of_every_family(family, spec):
    torch.manual_seed(0)
    model = make_model(family, position_encoding=f"{spec}+{DRAWN}").eval()
    tokens = make_tokens(3, 12)
    tokens[1:, 9:] = 1  # padding
    alone = logits(model, family, tokens[:1])
    found = logits(model, family, tokens)[:1]
    torch.testing.assert_close(found, alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("spec", ["rope", "alibi", "pope", "learned", "alibi+fox"])
def test_decoding_equals_the_full_pass(spec):
    torch.manual_seed(0)
    model = make_model("causal_lm", position_encoding=f"{spec}+{DRAWN}").eval()
    tokens = torch.randint(4, 20, (3, 12))
    with torch.no_grad():
        full, state = model(tokens)[0], {}
        for step in range(1, 13):
            now = model(tokens[:, :step], incremental_state=state)[0]
            torch.testing.assert_close(now[:, -1], full[:, step - 1], rtol=1e-4, atol=1e-5)


def test_the_library_decodes_with_drawn_numbers():
    torch.manual_seed(0)
    positions = StackPositions(f"alibi+{DRAWN}", WIDTH, HEADS, ROOM, causal=True).eval()
    layer = SelfAttention(positions).eval()
    x = torch.randn(2, 9, WIDTH)
    with torch.no_grad():
        full, _ = layer(*positions(x))
        cache = Cache()
        for step in range(9):
            out, _ = layer(*positions(x[:, step : step + 1], past=step), cache=cache)
            torch.testing.assert_close(out[:, 0], full[:, step], rtol=1e-4, atol=1e-5)


def test_the_table_of_learned_positions_holds_all_numbers():
    model = make_model("masked_lm", position_encoding=f"learned+{DRAWN}")
    (table,) = [x for name, x in model.named_parameters() if "embed_positions" in name]
    assert len(table) == LIMIT


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (f"m4m+{DRAWN}", "m4m uses distances between tokens"),
        (f"tupe+{DRAWN}", "tupe uses distances between tokens"),
        ("rope+randomized(limit=19)", "must be at least 20"),
        (f"sentence_learned+{DRAWN}", "sentence_learned counts in sentences, which random"),
        (f"rope(cross_attention=true)+{DRAWN}", "a decoder does not know the random positions"),
        ("rope+randomized+randomized", "randomized is named twice"),
    ],
)
def test_refuses_what_it_cannot_change(spec, message):
    with pytest.raises(UserError, match=message):
        PositionEncoding(spec, WIDTH, HEADS, ROOM, causal=True)
