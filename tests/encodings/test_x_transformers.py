"""Layers with today's encodings give what those of x-transformers give, weights copied.

``python -m tests.encodings.test_x_transformers`` prints the largest differences as a table.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from fairseq_posenc.api import SelfAttention, StackPositions

theirs = pytest.importorskip(
    "x_transformers.x_transformers", reason="pip install x-transformers==2.31.10"
)

WIDTH, HEADS, HEAD_DIM = 24, 3, 8
SIDES = [(0, 0), (0, 5), (5, 0)]  # padding on the left and right of each row


class Case(NamedTuple):
    spec: str
    against: str
    causal: bool
    parameters: dict[str, str]  # their names, by ours
    options: dict[str, Any] = {}  # noqa: RUF012  (never changed)


GATES = {
    f"fox.gate.{part}": f"data_dependent_alibi.to_forget_gates.0.{part}"
    for part in ("weight", "bias")
}
GATED = {"attn_data_dependent_alibi": True}
CASES = [
    Case("fox", "data-dependent ALiBi, causal", True, GATES, {"data_dependent_alibi": True}),
    Case("fox", "data-dependent ALiBi, both sides", False, GATES, {"data_dependent_alibi": True}),
    Case(
        "cope(positions=6)",
        "CoPE",
        True,
        {"cope.table": "attend.cope.pos_emb"},
        {"use_cope": True, "cope_max_pos": 6},
    ),
    Case("pope", "PoPE, causal", True, {"pope.delta": "learned_bias"}),
    Case("pope(base=500)", "PoPE, both sides", False, {"pope.delta": "learned_bias"}),
    Case(
        "sink",
        "learned sink",
        True,
        {"sink.score": "attend.head_attn_sink"},
        {"head_learned_sink": True},
    ),
]


def both(case: Case, x: Tensor, padding: Tensor) -> tuple[Tensor, Tensor]:
    """Return the outputs of our layer and of theirs, both in float64."""
    torch.manual_seed(2)
    sizes = {"dim": WIDTH, "heads": HEADS, "dim_head": HEAD_DIM, "causal": case.causal}
    layer = theirs.Attention(**sizes, **case.options).double().eval()
    base = 500 if "500" in case.spec else 10000
    polar = theirs.PolarEmbedding(HEAD_DIM, HEADS, base=base) if "pope" in case.spec else None
    positions = StackPositions(case.spec, WIDTH, HEADS, x.size(1), case.causal).double()
    ours = SelfAttention(positions, bias=False).double().eval()
    names = {f"{part}_proj.weight": f"to_{part}.weight" for part in ("q", "k", "v", "out")}
    names |= {f"encodings.{ours}": theirs for ours, theirs in case.parameters.items()}
    their_state = {**layer.state_dict(), **(polar.state_dict() if polar else {})}
    for name, parameter in ours.named_parameters():
        torch.nn.init.normal_(parameter, std=0.3)
        if name.endswith("delta"):  # to both sides of its bounds
            torch.nn.init.uniform_(parameter, -8, 1)
        copy = their_state[names.pop(name)]
        copy.copy_(parameter.detach().view_as(copy))
    assert not names
    with torch.no_grad():
        given = {"polar_pos_emb": polar(torch.arange(x.size(1)))} if polar else {}
        out = layer(x, mask=~padding, **given)
        return ours(*positions(x, padding))[0], out[0] if isinstance(out, tuple) else out


def differences(case: Case, length: int) -> list[Tensor]:
    """Return the differences at real tokens, in rows with padding on either side."""
    torch.manual_seed(1)
    x, padding = torch.randn(3, length, WIDTH).double(), torch.zeros(3, length, dtype=torch.bool)
    for row, (left, right) in enumerate(SIDES):
        padding[row, :left] = padding[row, length - right :] = True
    ours, others = both(case, x, padding)
    return [(ours - others)[~padding], others[~padding]]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.against)
def test_layers_are_equal(case):
    for length in (7, 40):
        difference, size = differences(case, length)
        assert difference.abs().max() < 1e-5
        assert size.abs().max() > 0.1


def test_only_here_does_decoding_keep_what_gates_forget():
    """Their cache holds no gates, so a step adds those of its own token alone: nothing."""
    torch.manual_seed(1)
    decoder = theirs.Decoder(dim=WIDTH, depth=1, heads=HEADS, attn_dim_head=HEAD_DIM, **GATED)
    model = theirs.TransformerWrapper(
        num_tokens=9, max_seq_len=0, attn_layers=decoder, use_abs_pos_emb=False
    ).eval()
    tokens = torch.randint(9, (2, 12))
    for forgetting in (0.0, 1.0):
        gates = decoder.layers[0][1].data_dependent_alibi.to_forget_gates[0]
        torch.nn.init.normal_(gates.weight, std=forgetting)
        torch.nn.init.constant_(gates.bias, 40 * (1 - forgetting))
        cache, steps = None, []
        with torch.no_grad():
            full = model(tokens)
            for i in range(12):
                step, cache = model(tokens[:, : i + 1], cache=cache, return_intermediates=True)
                steps.append(step[:, -1:])
        assert ((torch.cat(steps, 1) - full).abs().max() > 1e-4) == bool(forgetting)


if __name__ == "__main__":
    for case in CASES:
        found = max(differences(case, length)[0].abs().max().item() for length in (40, 300))
        print(f"| `{case.spec}` | x-transformers, {case.against} | 300 | {found:.0e} |")
