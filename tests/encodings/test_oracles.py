"""The oracles against facts that do not come from them: published numbers, other code, algebra."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from tests.helpers import oracles

HEADS, LENGTH, WIDTH = 2, 5, 4
K = 3  # smaller than LENGTH - 1, so that clipping is at work


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


def example(
    name: str, groups: int = 1, reset: bool = False
) -> tuple[torch.Tensor, torch.Tensor, dict, dict]:
    """Return random q, k, params and options for a score oracle."""
    torch.manual_seed(0)
    rows = 2 * K + 1 + (2 if reset else 0)
    wide, rates = HEADS * WIDTH, (HEADS, WIDTH)
    projections = {f"{side}_projection": (WIDTH, WIDTH) for side in ("query", "key")}
    norm = {"norm_weight": (wide,), "norm_bias": (wide,)}
    shapes: dict[str, dict[str, tuple[int, ...]]] = {
        **{x: {"table": (groups, rows, WIDTH)} for x in ("shaw", "m3", "m4", "m4m", "deberta")},
        **{x: {"table": (groups, rows)} for x in ("raffel", "m2", "tupe")},
        "m1": {"table": (groups, K + 1)},
        "t5": {"table": (HEADS, 32)},
        "transformer_xl": {"projection": (wide, wide), "u": rates, "v": rates},
        "fox": {"gate": (2 * HEADS, wide), "gate.bias": (2 * HEADS,)},
        "inkling": {"projection": (HEADS * 16, wide), "table": (2 * K - 1, 16)},
        "pope": {"delta": rates},
        "cope": {"table": (K, WIDTH)},
        "kerple": {"r1": (HEADS,), "r2": (HEADS,)},
        "deberta_v2": {"table": (512, wide), **norm},
        "tupe_shared": {"positions": (LENGTH + 1, wide), "buckets": (HEADS, 33), **norm},
        "fire": {"hidden_weight": (32, 1), "hidden_bias": (32,), "curvature": (), "length": ()},
    }
    shapes["deberta"] |= projections
    shapes["tupe"] |= {"positions": (LENGTH, WIDTH), **projections}
    shapes["fire"] |= {"output_weight": (HEADS, 32), "output_bias": (HEADS,)}
    for side in ("query", "key"):
        shapes["tupe_shared"] |= {f"{side}_weight": (wide, wide), f"{side}_bias": (wide,)}
    params = {key: draw(*shape) for key, shape in shapes.get(name, {}).items()}
    for key in {"r1", "r2", "curvature", "length"} & params.keys():  # which are positive
        params[key] = params[key].abs() + 0.1
    if name == "pope":
        params["delta"] -= 2
    limit = 128 if name == "t5" else K
    options: dict[str, Any] = {"max_distance": limit, "reset": reset, "max_positions": 512}
    if name == "inkling":
        options.update(extent=K, inputs=draw(LENGTH, HEADS * WIDTH))
    return draw(HEADS, LENGTH, WIDTH), draw(HEADS, LENGTH, WIDTH), params, options


def rows_of_distances() -> torch.Tensor:
    """Return the table row of each pair [LENGTH, LENGTH], made without a loop."""
    places = torch.arange(LENGTH)
    return (places[None, :] - places[:, None]).clamp(-K, K) + K


@pytest.mark.parametrize(
    ("name", "default"),
    [
        (name, {"deberta": 3, "deberta_v2": 3, "tupe": 2, "tupe_shared": 2}.get(name, 1))
        for name in oracles.SCORES
        if name not in ("fox", "inkling", "pope", "cope")  # which have none
    ],
)
def test_scale_factor(name, default):
    q, k, params, options = example(name)
    if name in ("tupe", "tupe_shared"):  # a bias outside the scale, beside two terms in it
        params["table" if name == "tupe" else "buckets"].zero_()
    ours = oracles.SCORES[name]
    usual = ours(q, k, params, options)
    bias = torch.zeros_like(usual)
    if ours.__doc__.startswith("e_ij = q_i.k_j / sqrt(c d) "):  # nothing else is in the scale
        bias = usual - oracles.none(q, k, {}, {})
    assert_close(ours(q, k, params, {**options, "scale_factor": default}), usual)
    fourfold = ours(q, k, params, {**options, "scale_factor": 4 * default})
    assert_close(fourfold - bias, (usual - bias) / 2)


def test_none_is_scaled_dot_product():
    q, k, _, _ = example("none")
    assert_close(oracles.none(q, k, {}, {}), q @ k.transpose(1, 2) / 2)


@pytest.mark.parametrize("groups", [1, HEADS])
@pytest.mark.parametrize(
    ("name", "formula"),
    [
        ("shaw", lambda qk, qa, ka: qk + qa),
        ("m4", lambda qk, qa, ka: qk + qa + ka),
        ("m4m", lambda qk, qa, ka: qk * qa * ka),
    ],
)
def test_vector_tables(name, formula, groups):
    q, k, params, options = example(name, groups)
    a = params["table"][:, rows_of_distances()].expand(HEADS, -1, -1, -1)
    qa = torch.einsum("hid,hijd->hij", q, a)
    ka = torch.einsum("hjd,hijd->hij", k, a)
    theirs = formula(q @ k.transpose(1, 2), qa, ka) / math.sqrt(WIDTH)
    assert_close(oracles.SCORES[name](q, k, params, options), theirs)


def test_m3():
    q, k, params, options = example("m3")
    a = params["table"][0, rows_of_distances()]
    theirs = torch.einsum("hid,hjd,ijd->hij", q, k, a) / math.sqrt(WIDTH)
    assert_close(oracles.m3(q, k, params, options), theirs)


def test_scalar_tables():
    q, k, params, options = example("raffel")
    a = params["table"][0, rows_of_distances()]
    content = q @ k.transpose(1, 2)
    assert_close(oracles.raffel(q, k, params, options), (content + a) / math.sqrt(WIDTH))
    assert_close(oracles.m2(q, k, params, options), content * a / math.sqrt(WIDTH))


def test_m1_is_m2_with_a_symmetric_table():
    q, k, params, options = example("m1")
    one_side = params["table"]
    both_sides = torch.cat([one_side.flip(1)[:, :-1], one_side], dim=1)
    assert both_sides.shape == (1, 2 * K + 1)
    theirs = oracles.m2(q, k, {"table": both_sides}, options)
    assert_close(oracles.m1(q, k, params, options), theirs)


def test_deberta_projects_row_vectors():
    q, k, params, options = example("deberta")
    a = params["table"][0, rows_of_distances()]
    total = q @ k.transpose(1, 2)
    total = total + torch.einsum("hid,ijd->hij", q, a @ params["query_projection"])
    total = total + torch.einsum("hjd,ijd->hij", k, a @ params["key_projection"])
    assert_close(oracles.deberta(q, k, params, options), total / math.sqrt(3 * WIDTH))


@pytest.mark.parametrize("name", ["deberta", "tupe"])
def test_tied_projections(name):
    q, k, params, options = example(name)
    twice = {**params, "key_projection": params["query_projection"]}
    theirs = oracles.SCORES[name](q, k, twice, options)
    del params["key_projection"]
    assert_close(oracles.SCORES[name](q, k, params, {**options, "tie_projections": True}), theirs)


def test_tupe():
    q, k, params, options = example("tupe")
    p = params["positions"]
    absolute = p @ params["query_projection"] @ (p @ params["key_projection"]).T
    theirs = (q @ k.transpose(1, 2) + absolute) / math.sqrt(2 * WIDTH)
    theirs = theirs + params["table"][0, rows_of_distances()]
    assert_close(oracles.tupe(q, k, params, options), theirs)


def test_transformer_xl():
    q, k, params, options = example("transformer_xl")
    embed_dim = HEADS * WIDTH
    places = torch.arange(LENGTH, dtype=torch.float64)
    distances = places[:, None] - places[None, :]  # i - j
    angles = distances[..., None] * 10000.0 ** (-torch.arange(0, embed_dim, 2) / embed_dim)
    s = torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(2)
    keys = torch.nn.functional.linear(s, params["projection"]).view(LENGTH, LENGTH, HEADS, WIDTH)
    content = torch.einsum("hid,hjd->hij", q + params["u"][:, None], k)
    position = torch.einsum("hid,ijhd->hij", q + params["v"][:, None], keys)
    theirs = (content + position) / math.sqrt(WIDTH)
    assert_close(oracles.transformer_xl(q, k, params, options), theirs)


@pytest.mark.parametrize("name", ["shaw", "raffel", "m2", "m3", "m4", "m4m", "deberta"])
def test_reset_reads_the_two_last_rows_for_the_first_position(name):
    q, k, params, options = example(name, reset=True)
    with_reset = oracles.SCORES[name](q, k, params, options)
    plain = {**options, "reset": False}
    assert_close(with_reset[:, 1:, 1:], oracles.SCORES[name](q, k, params, plain)[:, 1:, 1:])
    # a table that holds theta_1 (or theta_2) at every distance
    for theta, picked in ((-2, (slice(None), 0)), (-1, (slice(None), slice(1, None), 0))):
        constant = params["table"][:, theta].unsqueeze(1).repeat_interleave(2 * K + 1, dim=1)
        theirs = oracles.SCORES[name](q, k, {**params, "table": constant}, plain)
        assert_close(with_reset[picked], theirs[picked])


def test_reset_replaces_the_whole_positional_part_of_tupe():
    q, k, params, options = example("tupe", reset=True)
    ours = oracles.tupe(q, k, params, options)
    content = q @ k.transpose(1, 2) / math.sqrt(2 * WIDTH)
    theta_1, theta_2 = params["table"][0, -2], params["table"][0, -1]
    assert_close(ours[:, 0], content[:, 0] + theta_1)
    assert_close(ours[:, 1:, 0], content[:, 1:, 0] + theta_2)
    without = oracles.tupe(q, k, params, {**options, "reset": False})
    assert_close(ours[:, 1:, 1:], without[:, 1:, 1:])


def test_t5_adds_the_bias_outside_the_scale():
    q, k, params, options = example("t5")
    bias = oracles.t5(q, k, params, options) - q @ k.transpose(1, 2) / 2
    assert_close(bias[:, 0, 4], params["table"][:, 16 + 4])
    assert_close(bias[:, 4, 0], params["table"][:, 4])
    bias = oracles.t5(q, k, params, {**options, "bidirectional": False}) - q @ k.transpose(1, 2) / 2
    assert_close(bias[:, 0, 4], params["table"][:, 0])


def test_alibi_slopes():
    eight = [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256]
    between = [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]
    assert oracles.alibi_slopes(8) == pytest.approx(eight)
    assert oracles.alibi_slopes(12) == pytest.approx(eight + between)
    assert oracles.alibi_slopes(16) == pytest.approx([2 ** (-(n + 1) / 2) for n in range(16)])
    assert oracles.alibi_slopes(1) == pytest.approx([2**-8])
    assert oracles.alibi_slopes(3) == pytest.approx([2**-4, 2**-8, 2**-2])
    for heads in range(1, 40):
        slopes = oracles.alibi_slopes(heads)
        assert len(set(slopes)) == heads
        assert all(0 < slope < 1 for slope in slopes)


def test_alibi_punishes_both_sides():
    q = k = torch.zeros(8, 3, WIDTH, dtype=torch.float64)
    expected = torch.tensor([[0, -1, -2], [-1, 0, -1], [-2, -1, 0]], dtype=torch.float64)
    scores = oracles.alibi(q, k, {}, {"mode": "symmetric"})
    assert_close(scores[0], expected / 2)
    assert_close(scores[7], expected / 256)


def test_kerple():
    q = k = torch.zeros(1, 4, WIDTH, dtype=torch.float64)
    params = {"r1": torch.tensor([2.0]).double(), "r2": torch.tensor([3.0]).double()}
    scores = oracles.kerple(q, k, params, {})
    assert_close(scores[0, 3].tolist(), [-2 * math.log(x) for x in (10, 7, 4, 1)])
    assert_close(scores, scores.transpose(1, 2))


def test_sandwich():
    heads, width = 4, 16
    q = k = torch.zeros(heads, 6, WIDTH, dtype=torch.float64)
    scores = oracles.sandwich(q, k, {}, {"width": width})
    distances = (torch.arange(6)[:, None] - torch.arange(6)[None, :]).double()
    frequencies = 10000.0 ** (-2 * torch.arange(1, width // 2 + 1).double() / width)
    product = (distances[..., None] * frequencies).cos().sum(-1)
    for h in range(heads):
        assert_close(scores[h], (product - width / 2) / (8 * (h + 1) / heads))
    assert_close(scores.diagonal(dim1=1, dim2=2), torch.zeros(heads, 6, dtype=torch.float64))
    assert (scores <= 1e-12).all()


ROTATIONS = [
    {},
    {"base": 100.0},
    {"layout": "half"},
    {"fraction": 0.5},
    {"fraction": 0.5, "layout": "half"},
    {"scaling": "linear:4"},
    {"scaling": "ntk:4"},
    {"scaling": "yarn:4", "max_positions": 64},
]


def products(rotate, q, k, i, j):
    """Return the scores of one query at position i and one key at position j, for each head."""
    return (rotate(q, [i], False) * rotate(k, [j], True)).sum(-1)


@pytest.mark.parametrize("options", ROTATIONS, ids=str)
@pytest.mark.parametrize("rotation", ["rope", "xpos"])
def test_rotated_products_depend_on_the_distance_alone(rotation, options):
    torch.manual_seed(0)
    q, k = draw(HEADS, 1, 8), draw(HEADS, 1, 8)

    def rotate(x, positions, keys):
        return getattr(oracles, rotation)(x, positions, {**options, "keys": keys})

    for i, j in ((0, 0), (3, 0), (0, 3), (7, 5)):
        assert_close(products(rotate, q, k, i + 11, j + 11), products(rotate, q, k, i, j))
    assert not torch.allclose(products(rotate, q, k, 3, 0), products(rotate, q, k, 0, 3))


def test_rope_by_hand():
    x = torch.tensor([[[1.0, 0.0, 0.0, 2.0]]], dtype=torch.float64)
    slow = 3 / 100  # position 3, second pair: 10000^(-2/4) = 1/100
    expected = [math.cos(3), math.sin(3), -2 * math.sin(slow), 2 * math.cos(slow)]
    assert_close(oracles.rope(x, [3], {})[0, 0].tolist(), expected)
    halves = torch.tensor([[[1.0, 0.0, 0.0, 2.0]]], dtype=torch.float64)  # pairs (0, 2), (1, 3)
    expected = [math.cos(3), -2 * math.sin(slow), math.sin(3), 2 * math.cos(slow)]
    assert_close(oracles.rope(halves, [3], {"layout": "half"})[0, 0].tolist(), expected)


def test_rope_layouts_are_a_permutation_of_each_other():
    torch.manual_seed(0)
    x, order = draw(HEADS, 4, 8), [0, 2, 4, 6, 1, 3, 5, 7]
    interleaved = oracles.rope(x, range(4), {})
    assert_close(oracles.rope(x[..., order], range(4), {"layout": "half"}), interleaved[..., order])


def test_xpos_decays_with_distance():
    # Equal queries and keys, so that the product of pair t is zeta^(distance / scale_base) cos.
    x = torch.zeros(1, 1, 4, dtype=torch.float64)
    x[..., 0] = 1  # pair 0: zeta = 0.4 / 1.4, frequency 1
    for i, j in ((5, 5), (9, 3), (600, 88)):
        query = oracles.xpos(x, [i], {"keys": False})
        key = oracles.xpos(x, [j], {"keys": True})
        assert_close((query * key).sum().item(), (0.4 / 1.4) ** ((i - j) / 512) * math.cos(i - j))
    x = x.roll(2, dims=-1)  # pair 1 of 2: zeta = (0.5 + 0.4) / 1.4, frequency 1/100
    query, key = oracles.xpos(x, [7], {}), oracles.xpos(x, [2], {"keys": True})
    assert_close((query * key).sum().item(), (0.9 / 1.4) ** (5 / 512) * math.cos(5 / 100))


def test_allowed():
    ones = torch.ones(4, 4, dtype=torch.bool)
    assert torch.equal(oracles.allowed("both", 4, 4, None), ones)
    assert torch.equal(oracles.allowed("lr", 4, 4, None), ones.tril())
    assert torch.equal(oracles.allowed("rl", 4, 4, None), ones.triu())
    assert torch.equal(oracles.allowed("lr", 1, 4, None), ones.tril()[-1:])
    seen = oracles.allowed("rl", 4, 4, torch.tensor([False, False, False, True]))
    assert seen.tolist()[2] == [False, False, True, False]
    assert not seen[3].any()


@pytest.mark.parametrize("direction", ["both", "lr", "rl"])
@pytest.mark.parametrize("padded", [False, True])
def test_attention_equals_torch(direction, padded):
    q, k, _, _ = example("none")
    v = draw(HEADS, LENGTH, 3)
    padding = torch.tensor([False] * (LENGTH - 2) + [padded] * 2)
    mask = oracles.allowed(direction, LENGTH, LENGTH, padding)
    scores = 100 * oracles.none(q, k, {}, {})  # large scores: the exponential must not overflow
    ours = oracles.attention(scores, v, mask)
    assert_close(ours, scores.masked_fill(~mask, -math.inf).softmax(-1).nan_to_num(0.0) @ v)
    if padded and direction == "rl":
        assert (ours[:, -2:] == 0).all()


def test_shaw_values():
    q, k, params, options = example("shaw")
    v = draw(HEADS, LENGTH, WIDTH)
    params["value_table"] = draw(HEADS, 2 * K + 1, WIDTH)
    mask = oracles.allowed("lr", LENGTH, LENGTH, None)
    scores = oracles.shaw(q, k, params, options)
    weights = scores.masked_fill(~mask, -math.inf).softmax(-1)
    a = params["value_table"][:, rows_of_distances()]
    theirs = weights @ v + torch.einsum("hij,hijd->hid", weights, a)
    assert_close(oracles.shaw_values(scores, v, mask, params, options), theirs)


def test_fox_with_gates_of_one_value_is_alibi():
    q, k, params, options = example("fox")
    slopes = torch.tensor(oracles.alibi_slopes(HEADS), dtype=torch.float64)
    fixed = torch.log(1 / (torch.exp(slopes) - 1))  # log sigmoid of it is minus the slope
    gates = {"gate": torch.zeros_like(params["gate"]), "gate.bias": fixed.repeat(2)}
    alibi = oracles.alibi(q, k, {}, {**options, "mode": "symmetric"})
    assert_close(oracles.fox(q, k, gates, options), alibi)


def test_inkling_is_shaw_where_states_are_queries():
    q, k, params, options = example("inkling")
    content = oracles.none(q, k, {}, {})
    states = (options["inputs"] @ params["projection"].T).unflatten(-1, (HEADS, 16))
    distances = torch.arange(LENGTH)[None] - torch.arange(LENGTH)[:, None]
    rows = params["table"][(distances + K - 1).clamp(0, 2 * K - 2)]  # [LENGTH, LENGTH, 16]
    rows[distances.abs() >= K] = 0
    theirs = content + torch.einsum("ihw,ijw->hij", states, rows)
    assert_close(oracles.inkling(q, k, params, options), theirs)
    causal = oracles.inkling(q, k, {**params, "table": params["table"][:K]}, options)
    assert_close(causal.tril(), theirs.tril())
    assert_close(causal.triu(1), content.triu(1))


def test_lerope_with_factors_of_1_is_rope_and_with_others_has_another_base():
    q = draw(HEADS, LENGTH, WIDTH)
    places = list(range(LENGTH))
    still = torch.zeros(WIDTH // 2)
    assert_close(oracles.lerope(q, places, {"alpha": still}), oracles.rope(q, places, {}))
    # base^(-2t/d) exp(a_t) = other^(-2t/d) for a_t = 2t/d ln(base / other)
    alpha = torch.arange(0, WIDTH, 2, dtype=torch.float64) / WIDTH * math.log(10000 / 50)
    assert_close(oracles.lerope(q, places, {"alpha": alpha}), oracles.rope(q, places, {"base": 50}))


def test_pope_is_a_product_of_lifted_vectors():
    q, k, params, options = example("pope")
    theta = 10000.0 ** (-torch.arange(WIDTH, dtype=torch.float64) / WIDTH)
    places = torch.arange(LENGTH, dtype=torch.float64)[:, None] * theta  # [LENGTH, WIDTH]
    delta = params["delta"].clamp(-2 * math.pi, 0)[:, None]
    lengths = [torch.nn.functional.softplus(x) for x in (q, k)]
    waves = [torch.polar(x, a.expand_as(x)) for x, a in zip(lengths, (places, places + delta))]
    theirs = torch.einsum("hid,hjd->hij", waves[0].conj(), waves[1]).real / math.sqrt(WIDTH)
    assert_close(oracles.pope(q, k, params, options), theirs)


def test_cope_with_open_gates_counts_tokens():
    q, k, params, options = example("cope")
    q = torch.ones_like(q) * 40
    k = k.abs() + 1  # every gate is 1
    rows = (torch.arange(LENGTH)[:, None] - torch.arange(LENGTH) + 1).clamp(0, K - 1)
    theirs = q @ k.transpose(1, 2) / 2 + torch.einsum("hid,ijd->hij", q, params["table"][rows])
    assert_close(oracles.cope(q, k, params, options), theirs)
