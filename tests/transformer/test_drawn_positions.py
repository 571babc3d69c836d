"""Positions that are drawn: order, batches, evaluation, decoding, and what cannot take them."""

from __future__ import annotations

import pytest
import torch

from fairseq_posenc.api import Cache, PositionEncoding, SelfAttention, StackPositions
from fairseq_posenc.errors import UserError
from tests.helpers.formulas import awake
from tests.helpers.tiny_models import logits, make_model, make_tokens

WIDTH, HEADS, HEAD_DIM, ROOM, LIMIT = 16, 2, 8, 20, 90
DRAWN = f"randomized(limit={LIMIT})"


def numbers(positions: StackPositions, length: int) -> torch.Tensor:
    """Return the numbers at which tokens stand."""
    drawn = positions(torch.zeros(1, length, WIDTH))[1][0].positions.drawn
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


def test_of_as_many_numbers_as_positions_all_are_drawn_and_longer_inputs_are_refused():
    positions = StackPositions(f"rope+randomized(limit={ROOM})", WIDTH, HEADS, ROOM).train()
    assert numbers(positions, ROOM).tolist() == list(range(ROOM))
    with pytest.raises(UserError, match=f"{ROOM + 1} tokens is longer than the {ROOM} positions"):
        numbers(positions, ROOM + 1)


def test_an_even_evaluation():
    positions = StackPositions(f"rope+{DRAWN[:-1]},evaluation=even)", WIDTH, HEADS, ROOM).eval()
    assert numbers(positions, 4).tolist() == [0, 4, 9, 13]  # of 90 for 20


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("spec", ["rope", "xpos", "pope", "alibi", "sinusoidal", "learned"])
def test_tokens_stand_at_the_numbers(spec, causal):
    if spec == "xpos" and not causal:
        return
    drawing = awake(StackPositions(f"{spec}+{DRAWN}", WIDTH, HEADS, ROOM, causal)).eval()
    plain = StackPositions(spec, WIDTH, HEADS, LIMIT, causal).eval()
    plain.load_state_dict(drawing.state_dict())
    layers = [SelfAttention(stack).eval() for stack in (drawing, plain)]
    layers[1].load_state_dict(awake(layers[0]).state_dict())
    x, padding = torch.randn(2, 9, WIDTH), torch.zeros(2, 9, dtype=torch.bool)
    padding[1, :3] = True  # its tokens have the first numbers
    ids = torch.stack([drawn := numbers(drawing, 9), drawn.roll(3)])
    found = layers[0](*drawing(x, padding))[0]
    expected = layers[1](*plain(x, padding, position_ids=ids))[0]
    torch.testing.assert_close(found[~padding], expected[~padding], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("spec", ["rope", "pope", "alibi", "sinusoidal", "learned", "fox", "none"])
@pytest.mark.parametrize("family", ["causal_lm", "masked_lm", "translation"])
def test_models_of_every_family(family, spec):
    torch.manual_seed(0)
    model = make_model(family, position_encoding=f"{spec}+{DRAWN}").eval()
    tokens = make_tokens(3, 12)
    tokens[1:, 9:] = 1  # padding
    alone = logits(model, family, tokens[:1])
    torch.testing.assert_close(logits(model, family, tokens)[:1], alone, rtol=1e-4, atol=1e-4)


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
        (f"sentence_learned+{DRAWN}", "sentence_learned counts in sentences, and would ignore"),
        (f"rope(cross_attention=true)+{DRAWN}", "a decoder does not know the random positions"),
        ("rope+randomized+randomized", "randomized is named twice"),
    ],
)
def test_refuses_what_it_cannot_change(spec, message):
    with pytest.raises(UserError, match=message):
        PositionEncoding(spec, WIDTH, HEADS, ROOM, causal=True)
