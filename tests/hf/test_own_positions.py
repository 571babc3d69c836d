"""The spec of what a model of transformers has, and the word ``own`` in a spec."""

import json
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModel, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from fairseq_posenc.encodings.base import Dims
from fairseq_posenc.encodings.rope import Rope
from fairseq_posenc.errors import UserError
from fairseq_posenc.hf import own_positions, read_positions, set_positions
from fairseq_posenc.own_specs import expand_own, find_doubts
from fairseq_posenc.specs import parse

LONG = {"short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [1.0, 2.0, 4.0, 8.0]}
LINEAR = {"type": "linear", "factor": 2.0}
YARN = {"rope_type": "yarn", "factor": 4.0}
LLAMA3 = {
    **{"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 32},
    **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
}
LATE_WINDOW = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 3}
BUCKETS = {"relative_attention_num_buckets": 16, "relative_attention_max_distance": 20}
HALF = "rope(layout=half)"
MODERNBERT = f"rope(base=160000,layout=half),2*{HALF}+window(size=128)"
MROPE = {"type": "mrope", "mrope_section": [2, 1, 1]}  # of files by transformers 4
QWEN3_VL = "rope(base=500000,layout=half,sections=24/20/20,pairs=interleaved)"


def make_config(kind: str, **settings: Any) -> Any:
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 4}
    return AutoConfig.for_model(kind, **{**sizes, **settings})


# model type, settings, its spec, its number of positions
STATED: list[tuple[str, dict[str, Any], str, int]] = [
    ("llama", {}, HALF, 2048),
    ("llama", {"rope_theta": 500000.0}, "rope(base=500000,layout=half)", 2048),
    ("llama", {"rope_scaling": LLAMA3}, "rope(layout=half,scaling=llama3:8:length=32)", 2048),
    ("llama", {"rope_scaling": LINEAR}, "rope(layout=half,scaling=linear:2)", 2048),
    ("mistral", {"sliding_window": 16}, f"{HALF}+window(size=16)", 131072),
    ("mistral", {"sliding_window": None}, HALF, 131072),
    ("qwen2", LATE_WINDOW, f"3*{HALF},{HALF}+window(size=16)", 32768),
    ("qwen2", {"sliding_window": 16}, HALF, 32768),
    ("gemma", {"partial_rotary_factor": 0.5}, HALF, 8192),  # which its code does not read
    ("phi", {}, "rope(fraction=0.5,layout=half)", 2048),
    ("phi3", {"sliding_window": 16}, f"{HALF}+window(size=16)", 4096),
    ("starcoder2", {"sliding_window": 16}, f"{HALF}+window(size=16)", 4096),
    ("smollm3", {"num_hidden_layers": 10}, "3*rope(base=2000000,layout=half),none", 32768),
    ("exaone4", {"sliding_window": 16}, f"3*{HALF}+window(size=16),none", 2048),
    ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 4}, HALF, 2048),
    ("cohere", {"rope_theta": 10000.0}, "rope", 8192),
    ("glm4", {"num_hidden_layers": 1}, "rope(fraction=0.5)", 131072),
    ("modernbert", {}, MODERNBERT, 8192),
    ("qwen2_vl", {}, "rope(base=1000000,layout=half,sections=16/24/24)", 32768),
    ("qwen2_vl", {"rope_scaling": MROPE}, "rope(base=1000000,layout=half,sections=2/1/1)", 32768),
    ("qwen3_vl_text", {}, QWEN3_VL, 128000),
    ("gpt2", {}, "learned", 1024),
    ("roberta", {"max_position_embeddings": 514}, "learned", 512),
    ("whisper", {}, "learned", 448),
    ("marian", {}, "sinusoidal(layout=half)", 1024),
    ("m2m_100", {}, "sinusoidal(layout=fairseq)", 1024),
    ("t5", {}, "t5", 512),
    ("t5", {**BUCKETS, "n_positions": 64}, "t5(num_buckets=16,max_distance=20)", 64),
    # Transformers 5 has no tables by distance in BERT, whatever a configuration of 4 says.
    ("bert", {"position_embedding_type": "relative_key"}, "learned", 512),
]


@pytest.mark.parametrize(("kind", "settings", "spec", "length"), STATED)
def test_positions_of_a_configuration(kind, settings, spec, length):
    config = make_config(kind, **settings)
    assert read_positions(config) == spec
    assert own_positions.count_positions(config) == length
    # As a file states it, written by this version.
    assert read_positions(AutoConfig.for_model(**json.loads(config.to_json_string()))) == spec


# settings of rope, length that frequencies are computed for
SCALINGS: list[tuple[dict[str, Any], int]] = [
    ({"rope_type": "linear", "factor": 4.0}, 64),
    ({"rope_type": "dynamic", "factor": 2.0}, 64),
    ({"rope_type": "dynamic", "factor": 2.0}, 256),
    ({**YARN, "original_max_position_embeddings": 16}, 64),
    (YARN, 64),
    ({**YARN, "beta_fast": 8.0, "beta_slow": 2.0, "truncate": False}, 64),
    ({**YARN, "attention_factor": 1.5}, 64),
    ({**YARN, "mscale": 0.7, "mscale_all_dim": 0.4}, 64),
    ({**YARN, "mscale": 0.7}, 64),
    ({**YARN, "mscale": 1.0, "mscale_all_dim": 0.0}, 64),
    ({"rope_type": "longrope", "factor": 4.0, **LONG}, 64),
    ({"rope_type": "longrope", "factor": 4.0, "attention_factor": 1.25, **LONG}, 128),
    ({"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 16, **LONG}, 64),
    (LLAMA3, 64),
    ({**LLAMA3, "low_freq_factor": 0.5, "high_freq_factor": 8.0, "factor": 3.0}, 64),
    ({"rope_type": "proportional", "partial_rotary_factor": 0.5}, 64),
]


@pytest.mark.parametrize("part", [1.0, 0.5])
@pytest.mark.parametrize(("scaling", "length"), SCALINGS)
def test_scaled_rotations_are_those_of_transformers(scaling, length, part):
    """A GPT-NeoX rotates a part of each head, a Llama all of it; both have four pairs here."""
    settings: dict[str, Any] = {"rope_scaling": dict(scaling), "max_position_embeddings": 64}
    if part < 1 and "partial_rotary_factor" not in scaling:
        settings["rotary_pct"] = part
    kind, width = ("gpt_neox", 64) if part < 1 else ("llama", 32)
    config = make_config(kind, rope_theta=1000.0, hidden_size=width, **settings)
    (item,) = parse(read_positions(config)).items
    built = Rope(Dims(width, 4, length, pretrained_length=64), **dict(item.options))
    compute = ROPE_INIT_FUNCTIONS[scaling["rope_type"]]
    theirs, gain = compute(config, torch.device("cpu"), seq_len=length)
    torch.testing.assert_close(built.frequencies, theirs, rtol=1e-6, atol=1e-7)
    assert built.gain == pytest.approx(gain, rel=1e-6)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "paddleocr_vl_text": ({}, "M-RoPE"),
    "umt5": ({}, "each layer has its own table"),
    "inkling2_text": ({}, "adds relative states"),
    "dots3_note_text": ({}, "latent attention"),  # whose size may differ by layer
    "bloom": ({}, "takes no other attention"),
    "vit": ({}, "not known here"),
    "llama4_text": ({}, "chunked_attention"),
    "llama": ({"rope_scaling": {"rope_type": "spiral", "factor": 2.0}}, "unknown scaling 'spiral'"),
    "qwen3": ({"rope_scaling": {"rope_type": "default", "mrope_section": [1, 1, 2]}}, "M-RoPE"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_other_positions_are_refused_by_name(kind: str) -> None:
    settings, message = REFUSED[kind]
    whole = rf"^a model of type '{kind}.*{message}.*\Z"  # in a line
    with pytest.raises(UserError, match=whole):
        read_positions(CONFIG_MAPPING[kind](**settings))


def test_positions_that_were_set_are_read() -> None:
    config = LlamaConfig(position_encoding="t5+rope", position_encoding_max_positions=99)
    assert read_positions(config) == "rope+t5"
    assert own_positions.count_positions(config) == 99
    with pytest.raises(UserError, match="'tiny' is not a model"):
        read_positions("tiny")


SCALED = "rope(layout=half,scaling=linear:2)"
LAST_DIFFERS = "3*rope+window(size=8),rope(base=500)"
# the spec, that of the model, layers of the model, the spec with the model's in place of the word
OWN = [
    ("rope+alibi", HALF, 4, "rope+alibi"),
    ("own", HALF, 4, HALF),
    ("3*own+window(size=512),none", HALF, 4, f"3*{HALF}+window,none"),
    ("own(scaling=yarn:4)", HALF, 4, "rope(layout=half,scaling=yarn:4)"),
    ("own(base=500)", "rope(scaling=yarn:4)", 4, "rope(base=500,scaling=yarn:4)"),
    ("own(base=500,scaling=none)+sink", SCALED, 4, "rope(base=500,layout=half)+sink"),
    ("own,none", LAST_DIFFERS, 8, "rope+window(size=8),none"),
    ("none,own", LAST_DIFFERS, 8, "none,rope+window(size=8),none,rope(base=500)"),
    ("2*own,none", "rope,rope(base=500)", 4, "rope,rope(base=500),none,rope(base=500)"),
    ("own(scaling=yarn:4)", "3*rope,none", 8, "3*rope(scaling=yarn:4),none"),
    ("own(size=16)", "rope+window(size=8)", 8, "rope+window(size=16)"),
    ("own+window(size=16),none", "rope+window(size=8)", 8, "rope+window(size=16),none"),
    ("own+documents,own", "rope+documents", 8, "rope+documents"),
    ("own+t5", "learned", 4, "learned+t5"),
    ("own+alibi,own", "none", 4, "alibi,none"),
    ("own+learned", "rope,none", 4, "learned+rope,none"),
    ("2*own", "rope,none", 3, "rope,none"),
    ("own,none,own", "rope", 3, "rope,none"),
    ("own,none,own", "rope", 5, "rope,none,rope"),
    ("own", "rope,none,rope", 7, "rope,none,rope"),
    ("own,own+alibi", "rope,none,rope", 6, "rope,alibi,rope,rope+alibi,none,rope+alibi"),
]


@pytest.mark.parametrize(("spec", "theirs", "layers", "expanded"), OWN)
def test_own_means_the_positions_of_a_model(spec, theirs, layers, expanded):
    assert str(expand_own(spec, parse(theirs), layers)) == expanded


@pytest.mark.parametrize(
    ("spec", "theirs", "message"),
    [
        ("own(base=500)", "learned", r"own\(base=500\): .* no option 'base'; they are learned"),
        ("own(size=8),own", "rope,rope+window(size=4)", "no option 'size'"),
        ("own+rope", "rope", "rope is named twice"),
        ("own(scaling=yarn:4)", "rope(scaling=llama3:8)", "are scaled already, by llama3:8"),
        ("own(scaling=yarnn)", "rope", r"^own\(scaling=yarnn\), in .* rope\(.*did you mean yarn\?"),
        ("own+owl", "rope", "unknown position encoding 'owl'"),
        ("own(base=5,base=6)", "rope", r"own\(base=5,base=6\): base is set twice"),
    ],
)
def test_own_that_cannot_be_read_is_refused(spec: str, theirs: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        expand_own(spec, parse(theirs), 4)
    assert "\n" not in str(error.value)


@pytest.mark.filterwarnings("error:set_positions:UserWarning")
@pytest.mark.parametrize(
    ("kind", "spec", "warning"),
    [
        ("llama", "window(size=4)", "no positions now: window"),
        ("llama", "rope(scaling=yarn:2)", r"lacks options of .* rope\(layout=half\): write them"),
        ("gpt_neox", "own,lerope(base=5)", r"lerope.* model's rope\(fraction=0.25,layout=half\)"),
        ("modernbert", HALF, r"lacks options of the model's rope\(base=160000\)"),
        ("modernbert", "rope(base=160000,layout=half)", r"leaves out the model's window\(size=128"),
        ("modernbert", MODERNBERT, ""),
        ("modernbert", "own(base=10000),none,alibi", ""),
        ("modernbert", "rope(base=10000,layout=half)+window", ""),
        ("bert", "2*own+window,none", "learned acts on the input, so layers without own keep it"),
        ("bert", "own+alibi", ""),
        ("bert", "own, learned+alibi", ""),
    ],
)
def test_what_a_spec_may_do_unnoticed_is_said(kind: str, spec: str, warning: str) -> None:
    model = AutoModel.from_config(make_config(kind))
    with pytest.warns(UserWarning, match=warning) if warning else nullcontext():
        set_positions(model, spec)


def test_doubts_are_short_and_offer_only_what_is_there() -> None:
    spec = "rope(scaling=longrope:4:short={0}:long={0})".format("/".join(["1.5"] * 64))
    (doubt,) = {*find_doubts(HALF, parse(HALF), parse(spec), 2)}
    assert len(doubt) < 350
    assert "own" not in next(find_doubts("window", parse("window"), parse("none"), 2))
