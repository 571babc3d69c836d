"""Scalings of rotary positions: against the formulas, and against transformers."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch
import transformers

from fairseq_posenc.api import Cache, SelfAttention, StackPositions
from fairseq_posenc.encodings.base import Dims
from fairseq_posenc.encodings.rope import Rope
from fairseq_posenc.encodings.rope_scaling import (
    KINDS,
    Dynamic,
    Linear,
    Llama3,
    LongRope,
    Ntk,
    Proportional,
    Scaling,
    Yarn,
)
from fairseq_posenc.errors import UserError
from fairseq_posenc.specs import parse
from tests.helpers import oracles

WIDTH, LENGTH, ROOM = 16, 512, 1024
LISTS = "short=1/1/1/1.5/2/2/2/2:long=1/1/1.5/2/3/4/4/4"
THEIRS: dict[str, dict[str, Any]] = {
    "linear:3": dict(rope_type="linear", factor=3.0),
    f"dynamic:2:length={LENGTH}": dict(rope_type="dynamic", factor=2.0),
    f"yarn:4:length={LENGTH}": dict(rope_type="yarn", factor=4.0),
    f"yarn:4:beta_fast=16:beta_slow=2:length={LENGTH}": dict(
        rope_type="yarn", factor=4.0, beta_fast=16.0, beta_slow=2.0
    ),
    f"yarn:4:mscale=0.707:mscale_all_dim=1:truncate=false:length={LENGTH}": dict(
        rope_type="yarn", factor=4.0, mscale=0.707, mscale_all_dim=1.0, truncate=False
    ),
    f"yarn:4:attention_factor=1.25:length={LENGTH}": dict(
        rope_type="yarn", factor=4.0, attention_factor=1.25
    ),
    f"llama3:8:length={LENGTH}": dict(
        rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0
    ),
    f"llama3:32:low=2:high=8:length={LENGTH}": dict(
        rope_type="llama3", factor=32.0, low_freq_factor=2.0, high_freq_factor=8.0
    ),
    f"longrope:4:{LISTS}:length={LENGTH}": dict(
        rope_type="longrope",
        factor=4.0,
        short_factor=[1, 1, 1, 1.5, 2, 2, 2, 2],
        long_factor=[1, 1, 1.5, 2, 3, 4, 4, 4],
    ),
}


def rope(scaling: str, room: int = ROOM) -> Rope:
    (item,) = parse(f"rope(scaling={scaling})").items
    return Rope(Dims(2 * WIDTH, 2, room), **dict(item.options))


@pytest.mark.parametrize("room", [LENGTH, ROOM])
@pytest.mark.parametrize("scaling", THEIRS)
def test_frequencies_are_those_of_transformers(scaling, room):
    settings = {**THEIRS[scaling], "original_max_position_embeddings": LENGTH}
    of_input = settings["rope_type"] in ("dynamic", "longrope")  # which depend on its length
    config = transformers.LlamaConfig(
        hidden_size=2 * WIDTH,
        num_attention_heads=2,
        max_position_embeddings=LENGTH if of_input else room,
        rope_theta=10000.0,
        rope_scaling=settings,
    )
    compute = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS[settings["rope_type"]]
    expected, gain = compute(config, torch.device("cpu"), seq_len=room)
    ours = rope(scaling, room)
    torch.testing.assert_close(ours.frequencies, expected, rtol=1e-6, atol=0)
    assert ours.gain == pytest.approx(gain, rel=1e-7)


@pytest.mark.parametrize("room", [LENGTH, ROOM])
@pytest.mark.parametrize(
    "scaling", [*THEIRS, "ntk:4", "proportional:1:part=0.25", "proportional:2:part=0.7"]
)
def test_frequencies_are_those_of_the_formulas(scaling, room):
    ours = rope(scaling, room)
    options = {"scaling": scaling, "max_positions": room}
    expected = [oracles.rope_frequency(t, WIDTH, options) for t in range(WIDTH // 2)]
    found = ours.frequencies.double()
    torch.testing.assert_close(found, torch.tensor(expected).double(), rtol=2e-6, atol=0)
    assert ours.gain == pytest.approx(oracles.rope_attention_factor(options), rel=1e-12)


@pytest.mark.parametrize("scaling", [*THEIRS, "ntk:4", "proportional:1:part=0.25"])
def test_neighbors_padding_and_decoding_change_nothing(scaling):
    torch.manual_seed(1)
    positions = StackPositions(f"rope(scaling={scaling})", 2 * WIDTH, 2, ROOM, causal=True)
    layer = SelfAttention(positions).eval()
    x = torch.randn(2, 9, 2 * WIDTH)
    full = layer(*positions(x))[0]
    torch.testing.assert_close(layer(*positions(x[:1]))[0], full[:1])
    padded = torch.cat([torch.zeros(2, 4, 2 * WIDTH), x], 1)
    found = layer(*positions(padded, torch.arange(13).lt(4).expand(2, -1)))[0][:, 4:]
    torch.testing.assert_close(found, full, rtol=1e-4, atol=1e-5)
    cache = Cache()
    for i in range(9):
        step = layer(*positions(x[:, i : i + 1], past=i), cache)[0]
        torch.testing.assert_close(step[:, 0], full[:, i], rtol=1e-4, atol=1e-5)


def test_the_lists_of_a_large_head_are_read_back():
    numbers = "/".join(str(1 + n / 7) for n in range(128))  # a head of 256
    written = f"rope(scaling=longrope:4:short={numbers}:long={numbers})"
    assert parse(str(parse(written))) == parse(written)


def test_what_depends_on_the_length_takes_that_of_the_model():
    trained = rope(f"dynamic:2:length={LENGTH}", LENGTH)
    torch.testing.assert_close(trained.frequencies, rope("none").frequencies)
    longer = rope("dynamic:2")
    # As a checkpoint says that is read with more positions.
    longer.set_dims(longer.dims._replace(pretrained_length=LENGTH))
    torch.testing.assert_close(longer.frequencies, rope(f"dynamic:2:length={LENGTH}").frequencies)


@pytest.mark.parametrize(
    ("written", "canonical"),
    [
        ("yarn:4.0:truncate=true:beta_fast=32", "yarn:4"),
        ("yarn:4:beta_slow=2:beta_fast=16.0", "yarn:4:beta_fast=16:beta_slow=2"),
        ("llama3:8:length=512", "llama3:8:length=512"),
        ("longrope:4:long=1.50/4:short=1/1.0", "longrope:4:short=1/1:long=1.5/4"),
        ("proportional:1:part=0.5", "proportional:1:part=0.5"),
    ],
)
def test_scalings_have_one_canonical_form(written, canonical):
    assert str(parse(f"rope(scaling={written})")) == f"rope(scaling={canonical})"
    assert parse(f"rope(scaling={canonical})") == parse(f"rope(scaling={written})")
    assert str(parse("rope(scaling=yarn:1)")) == "rope"


SCALINGS = [
    ("linear:4", Linear(4.0)),
    ("linear:2.5", Linear(2.5)),
    ("ntk:4", Ntk(4.0)),
    ("dynamic:1", Dynamic(1.0)),  # its length may be below the model's number of positions
    ("dynamic:2:length=512", Dynamic(2.0, length=512)),
    ("yarn:1:length=9", Yarn(1.0, length=9)),
    (
        "yarn:4:beta_fast=16:mscale=0.707:mscale_all_dim=1:truncate=false",
        Yarn(4.0, beta_fast=16.0, mscale=0.707, mscale_all_dim=1.0, truncate=False),
    ),
    ("yarn:4:attention_factor=1.25", Yarn(4.0, attention_factor=1.25)),
    ("llama3:8:low=2:high=8:length=512", Llama3(8.0, low=2.0, high=8.0, length=512)),
    ("longrope:4:short=1/1:long=1.5/4", LongRope(4.0, (1.0, 1.0), (1.5, 4.0))),
    (
        "longrope:1:short=1:long=2:attention_factor=1.5:length=9",
        LongRope(1.0, (1.0,), (2.0,), attention_factor=1.5, length=9),
    ),
    ("proportional:2:part=0.25", Proportional(2.0, part=0.25)),
]


@pytest.mark.parametrize(("text", "scaling"), SCALINGS)
def test_a_text_is_a_dataclass_and_back(text, scaling):
    assert Scaling.parse(text) == scaling
    assert str(scaling) == text
    assert hash(Scaling.parse(text)) == hash(scaling)
    assert sum(scaling == other for _, other in SCALINGS) == 1


def test_the_table_has_every_kind():
    assert {scaling.kind for _, scaling in SCALINGS} == {*KINDS}


@pytest.mark.parametrize("kind", ["linear", "ntk", "yarn", "llama3", "proportional"])
def test_factor_one_is_none_unless_a_setting_is_changed(kind):
    assert Scaling.parse(f"{kind}:1.0") is None
    if kind in ("yarn", "llama3"):
        assert str(Scaling.parse(f"{kind}:1:length=8")) == f"{kind}:1:length=8"


def test_a_scaling_cannot_be_changed():
    with pytest.raises(FrozenInstanceError):
        Yarn(4.0).factor = 8.0


@pytest.mark.parametrize(
    "text",
    [
        "linear:2.7182818284590452353",
        "yarn:4:beta_fast=32.000000000000007",  # the number after 32, which 15 digits do not tell
        "longrope:2:short=1.0000000000000004/1:long=3.14159265358979312/0.30000000000000004",
    ],
)
def test_numbers_have_the_digits_that_are_written(text):
    scaling = Scaling.parse(text)
    assert Scaling.parse(str(scaling)) == scaling
    assert str(Scaling.parse(str(scaling))) == str(scaling)


def formulas(base=10000.0, room=ROOM):
    """Compute frequencies and gains by the formulas, in torch's float32."""
    exponents = -(torch.arange(0, WIDTH, 2, dtype=torch.float32) / WIDTH)
    plain = base**exponents
    raised = base * 4.0 ** (WIDTH / (WIDTH - 2))
    longer = base * (2.0 * room / LENGTH - 1.0) ** (WIDTH / (WIDTH - 2))
    pairs = torch.arange(WIDTH // 2, dtype=torch.float32)

    def pair(turns):
        return WIDTH * math.log(LENGTH / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = max(math.floor(pair(32.0)), 0), min(math.ceil(pair(1.0)), WIDTH - 1)
    yarn = 1 - ((pairs - low) / (high - low)).clamp(0, 1)
    llama = ((plain * LENGTH / (2 * math.pi) - 1.0) / 3.0).clamp(0, 1)
    return {
        "none": (plain, 1.0),
        "linear:3": (plain / 3.0, 1.0),
        "ntk:4": (raised**exponents, 1.0),
        f"dynamic:2:length={LENGTH}": (longer**exponents, 1.0),
        f"yarn:4:length={LENGTH}": (
            plain * yarn + plain / 4.0 * (1 - yarn),
            0.1 * math.log(4.0) + 1.0,
        ),
        f"llama3:8:length={LENGTH}": (plain * llama + plain / 8.0 * (1 - llama), 1.0),
        f"longrope:4:{LISTS}:length={LENGTH}": (
            plain / torch.tensor([1, 1, 1.5, 2, 3, 4, 4, 4]),
            math.sqrt(1 + math.log(4.0) / math.log(LENGTH)),
        ),
        "proportional:2:part=0.7": (plain / 2.0 * (pairs < 5), 1.0),
    }


@pytest.mark.parametrize("base", [10000.0, 500.0, 500000.0])
@pytest.mark.parametrize("scaling", formulas())
def test_frequencies_are_those_of_the_formulas_bit_for_bit(scaling, base):
    (item,) = parse(f"rope(base={base},scaling={scaling})").items
    ours = Rope(Dims(2 * WIDTH, 2, ROOM), **dict(item.options))
    expected, gain = formulas(base)[scaling]
    assert torch.equal(ours.frequencies, expected)
    assert ours.gain == gain


@pytest.mark.parametrize("scaling", [each for each in THEIRS if "dynamic" not in each])
def test_transformers_is_given_its_own_names(scaling):
    described = Scaling.parse(scaling).to_hf(Dims(2 * WIDTH, 2, ROOM))
    expected = dict(THEIRS[scaling])
    if expected["rope_type"] != "linear":
        expected["original_max_position_embeddings"] = LENGTH
    assert described == {**described, **expected}
    assert None not in described.values()


@pytest.mark.parametrize(
    ("scaling", "message"),
    [("yarn:4:beta=3", "yarn has no setting 'beta=3'"), ("yarn", "write none or KIND:F")],
)
@pytest.mark.parametrize("name", ["rope", "xpos"])
def test_a_mistake_names_the_encoding(name, scaling, message):
    with pytest.raises(UserError) as refused:
        parse(f"{name}(scaling={scaling})")
    assert str(refused.value).startswith(f"{name}(scaling={scaling}): {message}")


@pytest.mark.parametrize(
    "build",
    [
        lambda: Linear(0.5),
        lambda: Linear(math.nan),
        lambda: Yarn(2_000_000.0),
        lambda: Yarn(4.0, beta_fast=1.0, beta_slow=2.0),
        lambda: Llama3(4.0, low=4.0),
        lambda: Proportional(1.0, part=1.5),
    ],
)
def test_a_dataclass_without_a_meaning_is_refused(build):
    with pytest.raises(UserError):
        build()


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ("dynamic:0.5", "a factor F of at least 1, at most 1,000,000"),
        ("yarns:4", r"did you mean yarn\? .* kinds: linear, ntk, dynamic, yarn, llama3, longrope"),
        ("yarn:4:beta=3", "yarn has no setting 'beta=3': did you mean .* its settings: beta_fast"),
        ("linear:4:length=3", "linear has no setting 'length=3': its settings: none"),
        ("yarn:4:beta_fast=x", "beta_fast=x: expected a number"),
        ("yarn:4:truncate=no", "truncate=no: write true or false"),
        ("llama3:4:length=2.5", "length=2.5: expected a whole number"),
        ("proportional:1:part=1.5", "part must be at most 1"),
        ("longrope:4:short=1/1", r"longrope needs long=1/1.5/\.\.\., with a number for"),
        ("longrope:4:short=1/1:long=1/2", "short has 2 numbers, and there are 8 frequencies"),
        ("longrope:4:short=1/:long=1/2", "short=1/: expected a number"),
        ("yarn:4:beta_fast=8:beta_fast=16", "beta_fast is set twice"),
        ("yarn:4:beta_fast=1.7976931348623157e308", r"beta_fast=1\.79\S+: must be from 1e-06 to"),
        ("yarn:4:beta_fast=1:beta_slow=2", "beta_fast=1 must be at least beta_slow=2"),
        ("llama3:4:low=4", "low=4 must be below high=4"),
        ("llama3:4:length=10000000000", "length=10000000000: must be from 1 to 1,000,000,000"),
        ("none:2", "write none or KIND:F"),
    ],
)
def test_what_cannot_be_is_one_line(scaling, message):
    with pytest.raises(UserError, match=message):
        rope(scaling)
