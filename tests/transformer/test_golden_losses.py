"""The losses of twenty updates, with each encoding in each family, as they were written down.

``python -m tests.transformer.test_golden_losses`` writes them again, for all encodings or those
named: a change of numbers is a choice, and a line in the changelog. Weights and tokens come from
sines, not from a random generator, so that the losses are those of any machine and release of
torch. They are of float64: in float32, sums in another order move them by up to 1 % in twenty
updates, as Adam scales up gradients that are 0 but for rounding.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fairseq_posenc import registry
from tests.helpers.products import some_of
from tests.helpers.tiny_models import ARCHITECTURES, logits, make_model

GOLDEN = Path(__file__).with_name("golden_losses.json")
SEEN = (1, 10, 20)  # updates
CASES = [
    (family, spec)
    for family in ("masked_lm", "causal_lm", "translation")
    for spec in registry.names(encoder=family != "causal_lm")
]
# Every encoding in one family, in turn: the families differ in their stacks, not in encodings.
IN_TURN = [
    cases[number % len(cases)]
    for number, cases in enumerate(
        [case for case in CASES if case[1] == spec] for spec in registry.names()
    )
]


def waves(shape: torch.Size, number: int) -> Tensor:
    """Return numbers between -1 and 1 that look like noise."""
    places = torch.arange(shape.numel(), dtype=torch.float64)
    return (12.9898 * (places + 1) + 78.233 * number).sin().view(shape)


def sentences() -> Tensor:
    """Return four sentences of twelve tokens, two of them with padding."""
    tokens = (12 + 8 * waves(torch.Size((4, 12)), 99)).long()
    tokens[:, 0], tokens[:, -1] = 0, 2
    tokens[1, -3:] = torch.tensor([2, 1, 1])
    tokens[3, -1:] = 1
    return tokens


def losses(family: str, spec: str) -> list[float]:
    """Return the losses of a tiny model at some of twenty updates."""
    model = make_model(family, position_encoding=spec).train().double()
    with torch.no_grad():
        for number, (_, parameter) in enumerate(sorted(model.named_parameters())):
            parameter.copy_(0.2 * waves(parameter.shape, number))
            if parameter.dim() == 1:
                parameter.add_(1.0)  # the gain of a layer norm, or a slope
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    tokens, found = sentences(), []
    for update in range(1, SEEN[-1] + 1):
        scores = logits(model, family, tokens)[:, :-1].flatten(0, 1)
        loss = F.cross_entropy(scores, tokens[:, 1:].flatten(), ignore_index=1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if update in SEEN:
            found.append(round(loss.item(), 6))
    return found


@pytest.mark.parametrize(("family", "spec"), some_of(IN_TURN, CASES))
def test_losses_are_those_written_down(family, spec):
    expected = json.loads(GOLDEN.read_text(encoding="utf-8"))[family][spec]
    found = losses(family, spec)
    assert found == pytest.approx(expected, rel=1e-5)
    assert found[-1] < found[0]


if __name__ == "__main__":
    torch.set_num_threads(1)
    made: dict[str, dict[str, list[float]]] = {family: {} for family in ARCHITECTURES}
    written = json.loads(GOLDEN.read_text(encoding="utf-8"))
    for family, spec in CASES:
        again = spec in (sys.argv[1:] or [spec])
        made[family][spec] = losses(family, spec) if again else written[family][spec]
    rows = ",\n".join(
        f' "{family}": {{\n'
        + ",\n".join(f'  "{spec}": {each}' for spec, each in found.items())
        + "\n }"
        for family, found in made.items()
    )
    GOLDEN.write_text("{\n" + rows + "\n}\n", encoding="utf-8")
