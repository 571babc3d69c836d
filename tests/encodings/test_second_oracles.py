"""The library equals formulas that were written from the papers alone (``second_oracles.py``)."""

from __future__ import annotations

from math import floor, inf, log
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from fairseq_posenc.api import Cache, SelfAttention, StackPositions
from fairseq_posenc.assembly import build_shared
from tests.encodings import second_oracles as oracles
from tests.helpers.uncompiled_flex import run_uncompiled

C, HEADS, D, N, T = 16, 2, 8, 64, 11
REAL = [(0, 11), (4, 11), (0, 5), (1, 8), (10, 11)]  # of each row: where its tokens begin and end
BIASED, PLAIN = ("reference", "blocked", "flex"), ("reference",)
FORGETTING = ("reference", "blocked", "sdpa")
EXACT, FACTORS, ANGLES = 1e-9, 1e-6, 1e-5  # fixed temperatures and angles are float32


@pytest.fixture(autouse=True)
def _uncompiled(monkeypatch):
    run_uncompiled(monkeypatch)


class Case(NamedTuple):
    spec: str
    score: Any = oracles.plain  # from a layer's parameters
    tolerance: float = EXACT
    causal: tuple[bool, ...] = (True, False)
    backends: tuple[str, ...] = (*BIASED, "sdpa")
    window: float = inf
    softmax: dict[str, Any] = {}  # noqa: RUF012  (never changed)
    pretrained_length: int | None = None


def fixed(spec: str, factor: Any, pretrained_length: int | None = None) -> Case:
    softmax = {"factor": lambda head, i, keys: factor(i)}
    return Case(spec, tolerance=FACTORS, softmax=softmax, pretrained_length=pretrained_length)


def rope(options: str, *rotation: Any) -> Case:
    return Case(f"rope({options})", lambda state: oracles.rope(*rotation), ANGLES)


CASES = [
    Case("fox", oracles.fox, EXACT, (True,), FORGETTING),
    Case("fox", oracles.fox, EXACT, (False,), FORGETTING[:2]),
    Case("fox+window(size=3)", oracles.fox, EXACT, (True,), FORGETTING, window=3),
    Case("fox+ssmax+sink", oracles.fox, backends=FORGETTING[:2]),
    Case("cope", oracles.cope, EXACT, (True,), PLAIN),
    Case("cope(positions=3)", oracles.cope, EXACT, (True,), PLAIN),
    Case("cope+window(size=4)", oracles.cope, EXACT, (True,), PLAIN, window=4),
    Case("cope+ssmax+sink", oracles.cope, EXACT, (True,), PLAIN),
    Case("inkling", lambda state: oracles.inkling(state, N), backends=BIASED),
    Case("inkling(extent=4,rank=3)", lambda state: oracles.inkling(state, 4), backends=BIASED),
    Case(
        "inkling+window(size=5)+sink",
        lambda state: oracles.inkling(state, N),
        backends=BIASED,
        window=5,
    ),
    Case(
        "inkling(rank=5)+logn(factor=0.7,length=3)",
        lambda state: oracles.inkling(state, N),
        FACTORS,
        backends=BIASED,
        softmax={"factor": lambda head, i, keys: 1 + 0.7 * log(max(1, (i + 1) / 3))},
    ),
    Case("pope", oracles.pope, ANGLES),
    Case(
        "pope(base=50)+ssmax+sink", lambda state: oracles.pope(state, 50), ANGLES, backends=BIASED
    ),
    Case("ssmax"),
    Case("ssmax(offset=true)"),
    Case("inkling+ssmax(offset=true)", lambda state: oracles.inkling(state, N), backends=BIASED),
    Case("ssmax+sink+window(size=5)", backends=BIASED, window=5),
    Case("sink", backends=BIASED),
    Case("sink(value=0)", backends=BIASED, softmax={"sinks": [0.0] * HEADS}),
    Case("sink(value=-1.5)", backends=BIASED, softmax={"sinks": [-1.5] * HEADS}),
    fixed("logn(length=4)", lambda i: max(1, log(i + 1) / log(4))),
    fixed("logn(factor=0.3,length=4)", lambda i: 1 + 0.3 * log(max(1, (i + 1) / 4))),
    fixed("llama4(beta=0.7,length=3)", lambda i: 1 + 0.7 * log(1 + floor((i + 1) / 3))),
    fixed("ministral3(beta=0.7,length=3)", lambda i: 1 + 0.7 * log(1 + floor(i / 3))),
    fixed("drope(b=0.3)", lambda i: 1 + 0.3 * log(N / 16), 16),
    fixed("drope(b=-0.2)", lambda i: 1 - 0.2 * log(N / 5), 5),
    rope("base=30", oracles.unscaled(D, 30)),
    rope("scaling=dynamic:2:length=16", oracles.dynamic(D, 2, N, 16)),
    rope("layout=half,scaling=dynamic:3", oracles.dynamic(D, 3, N, N), 1, True),
    rope("scaling=yarn:4", oracles.yarn(D, 4, N), oracles.yarn_strength(4)),
    rope("scaling=yarn:4:attention_factor=1.3", oracles.yarn(D, 4, N), 1.3),
    rope(
        "base=20,scaling=yarn:4:length=32:beta_fast=5:beta_slow=0.5:truncate=false:mscale=0.7:"
        "mscale_all_dim=1",
        oracles.yarn(D, 4, 32, (5, 0.5), False, 20),
        oracles.yarn_strength(4, 0.7, 1),
    ),
    rope("base=100,scaling=llama3:8:low=1:high=4", oracles.llama3(D, 8, N, 1, 4, 100)),
    rope(
        "scaling=longrope:4:length=16:short=1/1/1.5/2:long=1/2/3/4.5",
        *oracles.longrope(D, 4, N, 16, [1, 1, 1.5, 2], [1, 2, 3, 4.5]),
    ),
    rope(
        "scaling=longrope:1:short=1/1/1.5/2:long=1/2/3/4.5",
        *oracles.longrope(D, 1, N, N, [1, 1, 1.5, 2], [1, 2, 3, 4.5]),
    ),
    rope("scaling=proportional:2:part=0.5", oracles.proportional(D, 2, 0.5)),
]
RUNS = [
    pytest.param(case, causal, id=f"{case.spec}-{'causal' if causal else 'encoder'}")
    for case in CASES
    for causal in case.causal
]
every_run = pytest.mark.parametrize(("case", "causal"), RUNS)


def built(case: Case, causal: bool, backend: str = "reference") -> tuple[Any, Any]:
    """Return positions and a layer with parameters as training could leave them."""
    torch.manual_seed(5)
    positions = StackPositions(case.spec, C, HEADS, max_positions=N, causal=causal)
    if case.pretrained_length:  # which a checkpoint says
        positions.dims = positions.dims._replace(pretrained_length=case.pretrained_length)
        positions.shared = build_shared(positions.spec, positions.dims)
    layer = SelfAttention(positions, backend=backend)
    for module in (positions.double().eval(), layer.double().eval()):
        for name, parameter in module.named_parameters():
            torch.nn.init.normal_(parameter, 1 if "gate.bias" in name else 0, 0.4)
            if name.endswith("delta"):  # to both sides of their bounds
                torch.nn.init.uniform_(parameter, -8, 1)
    return positions, layer


def expected(case: Case, causal: bool, layer: Any, x: Tensor) -> list[Tensor]:
    state = {name: value.tolist() for name, value in layer.state_dict().items()}
    sees = oracles.visible(len(x), causal, case.window)
    softmax = dict(case.softmax)
    if strength := state.get("encodings.ssmax.factor"):
        offset = state.get("encodings.ssmax.offset", [0.0] * HEADS)
        softmax["factor"] = lambda head, i, keys: strength[head] * log(keys) + offset[head]
    if sinks := state.get("encodings.sink.score"):
        softmax["sinks"] = sinks
    found = oracles.layer(x.tolist(), state, HEADS, sees, case.score(state), **softmax)
    return [torch.tensor(each, dtype=torch.float64) for each in found]


def batch() -> tuple[Tensor, Tensor]:
    padding = torch.ones(len(REAL), T, dtype=torch.bool)
    for row, (start, end) in enumerate(REAL):
        padding[row, start:end] = False
    return torch.randn(len(REAL), T, C, dtype=torch.float64), padding


@every_run
@torch.no_grad()
def test_padding_on_either_side(case, causal):
    x, padding = batch()
    _, layer = built(case, causal)
    exact = [expected(case, causal, layer, x[row, slice(*REAL[row])]) for row in range(len(REAL))]
    for backend in case.backends:
        positions, layer = built(case, causal, backend)  # with the same parameters
        out, weights = layer(*positions(x, padding), need_weights=backend == "reference")
        for row, (start, end) in enumerate(REAL):
            theirs, their_weights = exact[row]
            assert_close(out[row, start:end], theirs, rtol=0, atol=case.tolerance)
            if weights is not None:
                ours = weights[row, :, start:end, start:end].double()
                assert_close(ours, their_weights, rtol=0, atol=case.tolerance)
                assert not weights[row, :, :, padding[row]].any()


@pytest.mark.parametrize(("case", "causal"), [run for run in RUNS if run.values[1]])
@torch.no_grad()
def test_decoding_token_by_token(case, causal):
    _, layer = built(case, causal)
    x, padding = (rows[:2] for rows in batch())
    exact = [expected(case, causal, layer, x[row, slice(*REAL[row])])[0] for row in range(2)]
    for backend in case.backends:
        positions, layer = built(case, causal, backend)  # with the same parameters
        cache = Cache()
        steps = [
            layer(*positions(x[:, i : i + 1], padding[:, : i + 1], past=i), cache)[0]
            for i in range(T)
        ]
        for row, (start, _) in enumerate(REAL[:2]):
            assert_close(torch.cat(steps, 1)[row, start:], exact[row], rtol=0, atol=case.tolerance)


@every_run
def test_documents_give_what_they_give_alone(case, causal):
    positions, layer = built(case._replace(spec=case.spec + "+documents"), causal)
    x = torch.randn(1, T, C, dtype=torch.float64)
    ids = torch.tensor([[0, 0, 0, 1, 2, 2, 2, 2, 2, 2, 2]])
    out = layer(*positions(x, document_ids=ids))[0]
    for document in range(3):
        theirs, _ = expected(case, causal, layer, x[ids == document])
        assert_close(out[ids == document], theirs, rtol=0, atol=case.tolerance)


def test_randomized_positions():
    """The table of ``learned`` shows at which numbers the tokens stand."""
    limit, (x, padding) = 200, batch()
    spec = f"learned+rope(base=30)+randomized(limit={limit})"
    positions, layer = built(Case(spec), False)
    table = positions.state_dict()["input.learned.table.weight"]

    def read() -> Tensor:
        added = positions(x, padding)[0] - x
        places = (added[0, :, None] - table).abs().sum(-1).argmin(-1)
        for row, (start, end) in enumerate(REAL):
            assert_close(added[row, start:end], table[places[: end - start]])
        return places

    places = read()
    assert torch.equal(places, read())  # evaluation does not change
    out = layer(*positions(x, padding))[0]
    rotation = oracles.rope(oracles.unscaled(D, 30), places=places.tolist())
    case = Case(spec, lambda state: rotation)
    for row, (start, end) in enumerate(REAL):
        theirs, _ = expected(case, False, layer, x[row, start:end] + table[places[: end - start]])
        assert_close(out[row, start:end], theirs, rtol=0, atol=1e-4)  # angles up to ``limit``
    positions.train()
    draws = torch.stack([read() for _ in range(300)]).double()
    assert (draws.diff() >= 1).all()
    # On average the i-th of n, counted from 1, is i (limit + 1) / (n + 1) - 1.
    mean = torch.arange(1, T + 1) * (limit + 1) / (N + 1) - 1
    assert ((draws.mean(0) - mean).abs() < 5 * draws.std(0) / 300**0.5).all()


def test_frequencies_that_transformers_gives():
    """Of width 16, base 10,000 and trained length 512, by transformers 4.57.6."""
    published = {
        (0.270296127, 0.0730599985, 0.00144277664): oracles.dynamic(16, 2, 1024, 512),
        (0.25693506, 0.0625, 0.000790569466): oracles.yarn(16, 4, 512),
        (0.316227764, 0.1, 0.00039528473): oracles.llama3(16, 8, 512, 1, 4),
    }
    for theirs, ours in published.items():
        assert_close([ours[t] for t in (1, 2, 5)], list(theirs), rtol=1e-6, atol=0)
    assert oracles.yarn_strength(4) == pytest.approx(1.138629436)
    assert oracles.yarn_strength(4, 0.707, 1) == pytest.approx(0.964326915)
    assert oracles.longrope(16, 4, 2048, 512, [], [1.0] * 8)[1] == pytest.approx(1.105541597)
