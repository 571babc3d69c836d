"""What is seen of a forward pass is what the pass did."""

from __future__ import annotations

import pytest
import torch

from fairseq_posenc.transformer.capture_attention import capture_attention
from tests.helpers.tiny_models import ARCHITECTURES, STOCK, logits, make_model, make_tokens

PAD = 1
LAYERS = {"masked_lm": 3, "causal_lm": 2, "translation": 6}  # of translation, two are crosswise
SPECS = ["learned+m4m", "rope+shaw(reset=true)", "tupe", "t5", None]  # None for fairseq's own
CASES = [(family, spec) for family in ARCHITECTURES for spec in SPECS]


@pytest.mark.parametrize(
    ("family", "spec"), [*CASES, ("translation", "rope(cross_attention=true)")]
)
def test_weights_are_the_softmax_of_the_parts(family, spec):
    model = (
        make_model(family, position_encoding=spec) if spec else make_model(family, STOCK[family])
    )
    tokens = make_tokens(padding=2)
    before = logits(model, family, tokens)
    seen = capture_attention(model, lambda: logits(model, family, tokens))
    assert len(seen) == LAYERS[family]
    for attention in seen:
        if not spec or (attention.cross and "cross" not in spec):
            assert not attention.split.position.any()
            assert not attention.split.both.any()
        causal = attention.stack == "decoder" and not attention.cross
        hidden = tokens.eq(PAD)[:, None, None, :].expand(-1, -1, 9, -1).clone()
        if causal:
            hidden |= torch.ones(9, 9).triu(1).bool()
        scores = attention.split.scores.masked_fill(hidden, -torch.inf)
        real = tokens.ne(PAD)
        torch.testing.assert_close(
            attention.weights.transpose(1, 2)[real].double(),
            scores.softmax(-1).transpose(1, 2)[real],
            rtol=1e-4,
            atol=1e-6,
        )
    torch.testing.assert_close(logits(model, family, tokens), before, rtol=0, atol=0)


@pytest.mark.parametrize("spec", ["shaw", "t5", "rope", "alibi"])
def test_parts_are_those_of_the_ids_that_a_caller_gives(spec):
    model = make_model("masked_lm", position_encoding=spec)
    tokens = make_tokens()
    ids = torch.arange(9).flip(0)[None] * 2
    for attention in capture_attention(model, lambda: model(tokens, position_ids=ids)):
        weights = attention.split.scores.softmax(-1)
        torch.testing.assert_close(attention.weights.double(), weights, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("family", STOCK)
def test_models_of_fairseqs_own_are_seen(family):
    model = make_model(family, STOCK[family])
    tokens = make_tokens()
    with torch.no_grad():
        expected = logits(model, family, tokens)
    found = []
    seen = capture_attention(model, lambda: found.append(logits(model, family, tokens)))
    assert len(seen) == LAYERS[family]
    torch.testing.assert_close(found[0], expected, rtol=1e-4, atol=1e-5)
    for attention in seen:
        assert attention.weights.shape == (3, 4, 9, 9)
        total = attention.weights.sum(-1)
        torch.testing.assert_close(total, torch.ones_like(total))
