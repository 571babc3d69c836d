"""Scalings of rotary positions: against the formulas, and against transformers."""

from __future__ import annotations

import pytest
import torch

from fairseq_posenc.api import SelfAttention, StackPositions
from fairseq_posenc.encodings.base import Dims
from fairseq_posenc.encodings.rope import Rope
from fairseq_posenc.errors import UserError
from fairseq_posenc.specs import parse
from tests.helpers import oracles

transformers = pytest.importorskip("transformers")
WIDTH, LENGTH, ROOM = 16, 512, 1024
LISTS = "short=1/1/1/1.5/2/2/2/2:long=1/1/1.5/2/3/4/4/4"
THEIRS = {
    "linear:3": {"rope_type": "linear", "factor": 3.0},
    f"dynamic:2:length={LENGTH}": {"rope_type": "dynamic", "factor": 2.0},
    f"yarn:4:length={LENGTH}": {"rope_type": "yarn", "factor": 4.0},
    f"yarn:4:beta_fast=16:beta_slow=2:length={LENGTH}": {
        "rope_type": "yarn",
        "factor": 4.0,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
    },
    f"yarn:4:mscale=0.707:mscale_all_dim=1:truncate=false:length={LENGTH}": {
        "rope_type": "yarn",
        "factor": 4.0,
        "mscale": 0.707,
        "mscale_all_dim": 1.0,
        "truncate": False,
    },
    f"yarn:4:attention_factor=1.25:length={LENGTH}": {
        "rope_type": "yarn",
        "factor": 4.0,
        "attention_factor": 1.25,
    },
    f"llama3:8:length={LENGTH}": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
    f"llama3:32:low=2:high=8:length={LENGTH}": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 2.0,
        "high_freq_factor": 8.0,
    },
    f"longrope:4:{LISTS}:length={LENGTH}": {
        "rope_type": "longrope",
        "factor": 4.0,
        "short_factor": [1, 1, 1, 1.5, 2, 2, 2, 2],
        "long_factor": [1, 1, 1.5, 2, 3, 4, 4, 4],
    },
}


def rope(scaling: str, room: int = ROOM) -> Rope:
    (item,) = parse(f"rope(scaling={scaling})").items
    return Rope(Dims(2 * WIDTH, 2, room), **dict(item.options))


@pytest.mark.parametrize("room", [LENGTH, ROOM])
@pytest.mark.parametrize("scaling", THEIRS)
def test_frequencies_are_those_of_transformers(scaling, room):
    settings = {**THEIRS[scaling], "original_max_position_embeddings": LENGTH}
    of_input = settings["rope_type"] in ("dynamic", "longrope")  # whose length is told apart
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
    assert ours.scaling.gain(ours.dims) == pytest.approx(gain, rel=1e-7)


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
    gain = oracles.rope_attention_factor(options)
    assert ours.scaling.gain(ours.dims) == pytest.approx(gain, rel=1e-12)


@pytest.mark.parametrize("scaling", [*THEIRS, "ntk:4", "proportional:1:part=0.25"])
def test_neighbours_padding_and_decoding_change_nothing(scaling):
    torch.manual_seed(1)
    positions = StackPositions(f"rope(scaling={scaling})", 2 * WIDTH, 2, ROOM, causal=True)
    layer = SelfAttention(positions).eval()
    x = torch.randn(2, 9, 2 * WIDTH)
    full = layer(*positions(x))[0]
    torch.testing.assert_close(layer(*positions(x[:1]))[0], full[:1])
    padded = torch.cat([torch.zeros(2, 4, 2 * WIDTH), x], 1)
    padding = torch.arange(13).lt(4).expand(2, -1)
    torch.testing.assert_close(
        layer(*positions(padded, padding))[0][:, 4:], full, rtol=1e-4, atol=1e-5
    )
    cache: dict = {}
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
    longer.trained_at(LENGTH)  # as a checkpoint says that is read with more positions
    torch.testing.assert_close(longer.frequencies, rope(f"dynamic:2:length={LENGTH}").frequencies)


@pytest.mark.parametrize(
    ("written", "canonical"),
    [
        ("yarn:4.0:truncate=true:beta_fast=32", "yarn:4"),
        ("yarn:4:beta_slow=2:beta_fast=16.0", "yarn:4:beta_fast=16:beta_slow=2"),
        ("llama3:8:length=512", "llama3:8:length=512"),
        ("longrope:4:long=1.50/4:short=1/1.0", "longrope:4:short=1/1:long=1.5/4"),
        ("proportional:1:part=1", "proportional:1"),
    ],
)
def test_scalings_have_one_canonical_form(written, canonical):
    assert str(parse(f"rope(scaling={written})")) == f"rope(scaling={canonical})"
    assert parse(f"rope(scaling={canonical})") == parse(f"rope(scaling={written})")
    assert str(parse("rope(scaling=yarn:1)")) == "rope"


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ("dynamic:0.5", "a factor F of at least 1, at most 1,000,000"),
        ("yarns:4", "one of these kinds: linear, ntk, dynamic, yarn, llama3, longrope"),
        ("yarn:4:beta=3", "yarn has no setting 'beta=3'; its settings: beta_fast"),
        ("linear:4:length=3", "linear has no setting 'length=3'; its settings: none"),
        ("yarn:4:beta_fast=x", "'beta_fast=x' is not a number above 0"),
        ("yarn:4:truncate=no", "truncate is true or false"),
        ("llama3:4:length=2.5", "length must be a whole number"),
        ("proportional:1:part=1.5", "part must be at most 1"),
        ("longrope:4:short=1/1", "longrope needs long"),
        ("longrope:4:short=1/1:long=1/2", "short has 2 numbers, and 8 pairs"),
    ],
)
def test_what_cannot_be_is_one_line(scaling, message):
    with pytest.raises(UserError, match=message):
        rope(scaling)
