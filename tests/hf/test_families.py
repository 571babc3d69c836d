"""Models that are built alike: their own positions, others, and refusals."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
)

from fairseq_posenc.encodings.base import Dims
from fairseq_posenc.errors import UserError
from fairseq_posenc.hf import families, read_positions, replacing, set_positions
from fairseq_posenc.hf.attention import AttentionPositions
from fairseq_posenc.hf.stack_arguments import StackArguments
from fairseq_posenc.workbench.hf.capture_attention import capture_attention
from tests.helpers.hf_models import (
    MODELS,
    SYMBOLS,
    compute_in_steps,
    compute_logits,
    distance,
    make_inputs,
    pad,
    redraw,
    redraw_positions,
)
from tests.helpers.products import some_of

SIZES = {
    **{"vocab_size": SYMBOLS, "hidden_size": 32, "intermediate_size": 48, "head_dim": 8},
    **{"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    **{"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "n_group": 1},
    **{"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "topk_group": 1},
    **{"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "attention_dropout": 0.0,
}
ROTATED = [
    kind
    for kind, family in families.FAMILIES.items()
    if family.rotary and kind in CONFIG_MAPPING and kind != "modernbert"
]
ALIKE = {  # models with tables, and the tiny model whose sizes they take
    **dict.fromkeys(("biogpt", "gpt_bigcode"), "gpt2"),
    **dict.fromkeys(("bert-generation", "distilbert"), "bert"),
    **dict.fromkeys(
        ("camembert", "data2vec-text", "xlm-roberta-xl", "roberta-prelayernorm", "ernie"), "roberta"
    ),
    **dict.fromkeys(("blenderbot", "mbart", "pegasus", "plbart"), "bart"),
    "mt5": "t5",
}
HYBRIDS = {  # the type of their other layers
    **dict.fromkeys(("lfm2", "lfm2_moe"), "conv"),
    **dict.fromkeys(("olmo_hybrid", "qwen3_next"), "linear_attention"),
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text"), "linear_attention"),
}
ON_AXES = [kind for kind in ROTATED if families.FAMILIES[kind].sections]
LINEAR = {
    **{"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2},
    **{"linear_num_value_heads": 4, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
}
FRACTIONS = {  # of a head that their configurations rotate by default
    **{"glm": 0.5, "glm4": 0.5, "glm4_moe": 0.5, "persimmon": 0.5, "phi": 0.5, "gpt_neox": 0.25},
    **{"laguna": 0.5, "qwen3_next": 0.25, "qwen3_5_text": 0.75, "qwen3_5_moe_text": 0.75},
}


SHARING = "gemma4_text sharing"  # its last two layers read the keys of the first two


def build(name):
    kind, _, shares = name.partition(" ")
    torch.manual_seed(1)
    like = MODELS[ALIKE[kind]] if kind in ALIKE else None
    sizes = SIZES if like is None else like.settings
    if kind.endswith("_swa"):  # a base for each layer, 0 for none
        sizes = {**sizes, "sliding_window": 5, "layer_rope_theta": [0, 10000.0, 500.0, 0]}
    if kind == "gemma4_text":  # heads of two widths, by type of layer
        types = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 5}
        sees = {"use_bidirectional_attention": "vision"}  # of the tokens of images alone
        sizes = {**sizes, **types, **sees, "global_head_dim": 16, "hidden_size_per_layer_input": 8}
        sizes["num_kv_shared_layers"] = 2 if shares else 0
    if kind in HYBRIDS:  # only every other layer has attention
        types = [HYBRIDS[kind], "full_attention"] * 4
        sizes = {**sizes, **copy.deepcopy(LINEAR), "num_hidden_layers": 8, "layer_types": types}
    if kind in ON_AXES:
        rotated = [1, 1, 1] if kind in HYBRIDS else [2, 1, 1]  # pairs of coordinates
        parts = {"mrope_section": rotated, "partial_rotary_factor": sum(rotated) / 4}
        sizes = {**sizes, "rope_parameters": {**LINEAR["rope_parameters"], **parts}}
    config = CONFIG_MAPPING[kind](**sizes)
    if kind == "ministral3":  # whose temperature changes in the inputs of these tests
        lengths = {"original_max_position_embeddings": 8, "llama_4_scaling_beta": 0.5}
        config.rope_parameters = {**config.rope_parameters, **lengths}
    autos = [AutoModelForCausalLM, AutoModelForMaskedLM, AutoModel]  # the last for a tower of text
    if like is not None and not like.generates:
        autos = autos[1:]
    if config.is_encoder_decoder:
        autos = [AutoModelForSeq2SeqLM]
    auto = next(auto for auto in autos if type(config) in auto._model_mapping)
    # transformers' sdpa leaves the cap of scores out.
    model = auto.from_config(config, attn_implementation="eager").eval()
    redraw(model, 0.1 if kind in HYBRIDS else 0.2)  # their recurrences multiply roundings
    ids = torch.randint(3, SYMBOLS, (2, 12))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if config.is_encoder_decoder:
        inputs["decoder_input_ids"] = torch.randint(3, SYMBOLS, (2, 12))
    return model, inputs


@pytest.mark.parametrize("kind", dict.fromkeys([*ROTATED, SHARING, *ALIKE, *MODELS]))
def test_own_is_what_the_stock_model_computes(kind):
    """Padded, beyond the trained length, and token by token with a cache."""
    tiny = MODELS.get(kind)
    model, inputs = (tiny.build(), make_inputs(tiny)) if tiny else build(kind)
    assert type(model).config_class is type(model.config)  # else no Auto class loads its folder
    own = set_positions(copy.deepcopy(model), "own")
    family = families.FAMILIES[model.config.model_type]
    # Stock tables and temperatures count it, unless ids are passed.
    counts_padding = bool(family.table or family.temperature)
    right = pad(inputs, 0, 3)
    assert distance(compute_logits(own, right)[:, :-3], compute_logits(model, right)[:, :-3]) < 1e-5
    if not counts_padding:
        left = pad(inputs, 3, 0)
        assert distance(compute_logits(own, left)[:, 3:], compute_logits(model, left)[:, 3:]) < 1e-5
    if family.rotary:  # the others have no rows there
        tokens = torch.randint(3, SYMBOLS, (2, 80))
        long = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        assert distance(compute_logits(own, long), compute_logits(model, long)) < 1e-5
    if not own.can_generate() or kind == "whisper":
        return
    # Stock encoders count padding on the left; decoders get ids from `generate`.
    left = 0 if own.config.is_encoder_decoder else 2
    prompt = pad({key: x for key, x in inputs.items() if "decoder" not in key}, left, 2 - left)
    padding = model.config.pad_token_id
    texts = [
        x.generate(**prompt, max_new_tokens=4, do_sample=False, pad_token_id=padding)
        for x in (model, own)
    ]
    assert torch.equal(*texts)


@pytest.mark.parametrize("name", MODELS)
def test_our_attention_computes_what_the_models_does(name):
    """A window that hides nothing leaves the model's own positions, and takes our attention."""
    model, inputs = MODELS[name].build(), make_inputs(MODELS[name])
    expected, present = compute_logits(model, inputs), read_positions(model)
    set_positions(model, "own" if "window" in present else "own+window(size=200)")
    assert model.config._attn_implementation == "fairseq_posenc"
    assert distance(compute_logits(model, inputs), expected) < 1e-5


def test_attention_that_ours_cannot_repeat_is_not_shown():
    model, inputs = build("hunyuan_v1_dense")
    torch.nn.init.uniform_(model.model.layers[0].self_attn.query_layernorm.weight)
    with pytest.raises(UserError, match="changes rotated queries and keys"):
        capture_attention(set_positions(model, "own"), inputs)
    model, inputs = build("afmoe")  # whose code passes the mask by its name
    assert len(capture_attention(set_positions(model, "own"), inputs)) == 4


# One type of each description; `own` is tested with all of them above.
DIFFERENT = {str(families.FAMILIES[kind]): kind for kind in [*ROTATED, *ALIKE]}.values()
BY_CODE = [x for x in some_of(DIFFERENT, ROTATED) if x not in ("gemma4_text", *ALIKE)]


@pytest.mark.parametrize("kind", some_of(DIFFERENT, [*ROTATED, *ALIKE]))
def test_other_positions_ignore_padding(kind):
    model, inputs = build(kind)
    before = compute_logits(model, inputs)
    set_positions(model, "deberta_v2+sink")
    padded = compute_logits(model, pad(inputs, 3, 2))[:, 3:-2]
    assert distance(padded, compute_logits(model, inputs)) < 1e-5
    set_positions(model, "none")
    assert distance(compute_logits(model, inputs), before) > 1e-2


def test_rows_are_projected_as_states_where_heads_are_side_by_side():
    config = CONFIG_MAPPING["gpt_bigcode"](multi_query=False, **MODELS["gpt2"].settings)
    attention = AutoModel.from_config(config).h[0].attn
    rows = torch.randn(5, config.n_embd)
    heads = attention.c_attn(rows).view(5, config.n_head, -1).transpose(0, 1)
    dims = Dims(config.n_embd, config.n_head, max_positions=5)
    projected = families.FAMILIES["gpt_bigcode"].project_rows(attention, rows, dims)
    for found, expected in zip(projected, heads.chunk(3, -1)):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("kind", ON_AXES)
@pytest.mark.parametrize("spec", ["own", "alibi"])
def test_tokens_have_positions_on_several_axes(kind, spec):
    """Those of the text stand before them, and a spec without axes reads these."""
    model, inputs = build(kind)
    set_positions(other := copy.deepcopy(model), spec)
    grid = torch.randint(0, 30, (3, 2, 12)).sort().values  # of one text, whose time goes on
    text = torch.arange(12).expand(1, 2, 12)
    ids = torch.cat([text, grid])
    whole = compute_logits(other, {**inputs, "position_ids": ids})
    if spec == "own":
        for named in ({**inputs, "position_ids": given} for given in (grid, ids)):
            assert distance(compute_logits(other, named), compute_logits(model, named)) < 1e-5
        with pytest.raises(UserError, match="several documents"):
            other(inputs["input_ids"], position_ids=torch.cat([text % 8, grid]))
    else:
        for named in (inputs, {**inputs, "position_ids": grid}):
            assert distance(compute_logits(other, named), whole) < 1e-5
        for named in ({"input_ids": inputs["input_ids"]}, inputs):
            with pytest.raises(UserError, match="do not separate documents"):
                other(**named, position_ids=grid % 8)
    spans, tokens = ((0, 5), (5, 6), (6, 12)), inputs["input_ids"]
    steps = [{"input_ids": tokens[:, a:b], "position_ids": ids[..., a:b]} for a, b in spans]
    assert distance(compute_in_steps(other, steps), whole) < 2e-5


@pytest.mark.parametrize("kind", [*HYBRIDS, "gemma4_text", SHARING])
def test_positions_of_layers_that_differ(kind, tmp_path):
    """The cache has layers of two kinds, and the file all weights."""
    model, inputs = build(kind)
    spec = "learned+fox+window(size=4),t5" if kind in HYBRIDS else "fox+window(size=4),t5"
    assert read_positions(set_positions(model, spec)) == spec
    redraw_positions(model)
    whole = compute_logits(model, inputs)
    assert distance(compute_logits(model, pad(inputs, 3, 2))[:, 3:-2], whole) < 1e-5
    steps = [{"input_ids": inputs["input_ids"][:, a:b]} for a, b in ((0, 5), (5, 6), (6, 12))]
    assert distance(compute_in_steps(model, steps), whole) < 1e-5
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(compute_logits(loaded, inputs), whole)
    of_gemma = {"t5,m4m": "8 and 16 wide", "rope": "16 wide", "learned": "finds tokens by"}
    refused = {"own+documents": "would mix"} if kind in HYBRIDS else of_gemma
    for other, words in [*refused.items(), ("7*t5,none", "the stack has 4")]:
        with pytest.raises(UserError, match=words):
            set_positions(model, other)


@pytest.mark.parametrize("kind", BY_CODE)
def test_rotations_by_the_models_code_are_those_of_the_library(kind):
    model, inputs = build(kind)
    layout = "interleaved" if "pairs" in families.FAMILIES[kind].cosines else "half"
    rope = f"rope(layout={layout},fraction={FRACTIONS.get(kind, 1)})"
    spec = f"{rope},{rope}+alibi,none,{rope.replace('(', '(base=500,')}"
    logits = compute_logits(set_positions(model, spec), inputs)
    layers = [layer for layer in model.modules() if isinstance(layer, AttentionPositions)]
    assert any(layer.plan.is_rotated for layer in layers)
    for layer in layers:  # nothing is left to the model's code
        layer.plan = layer.plan._replace(is_rotated=False)
    assert distance(compute_logits(model, inputs), logits) < 1e-5


def test_a_hybrid_of_attention_alone_takes_windows():
    config = CONFIG_MAPPING["lfm2"](**SIZES, layer_types=["full_attention"] * 4)
    model = set_positions(AutoModelForCausalLM.from_config(config).eval(), "t5+window(size=4),none")
    ids = torch.randint(3, SYMBOLS, (2, 12))
    settings = {"max_new_tokens": 6, "do_sample": False}
    texts = [model.generate(ids, **settings, use_cache=use_cache) for use_cache in (True, False)]
    assert torch.equal(*texts)


def test_layers_with_different_numbers_of_heads_take_rotations_alone():
    config = CONFIG_MAPPING["laguna"](**SIZES, num_attention_heads_per_layer=[4, 8, 4, 8])
    model, ids = AutoModelForCausalLM.from_config(config).eval(), torch.arange(3, 15)[None]
    before = compute_logits(model, {"input_ids": ids})
    with pytest.raises(UserError, match="different numbers of heads, 4 and 8"):
        set_positions(model, "alibi")
    set_positions(model, "own")
    assert distance(compute_logits(model, {"input_ids": ids}), before) < 1e-5


def test_a_mask_may_be_on_another_device_than_the_tokens():
    model = set_positions(MODELS["roberta"].build(), "alibi")
    (stack,) = families.FAMILIES["roberta"].find_stacks(model)
    ids = torch.arange(2, 8, device="meta")[None]  # those of positions begin after the padding, 1
    named = {"input_ids": ids, "position_ids": ids, "attention_mask": torch.ones(1, 6)}
    assert StackArguments(named, stack.module.positions, stack).ids.is_meta


SHARED = {"num_kv_shared_layers": 1, "layer_types": ["full_attention"] * 4}


@pytest.mark.parametrize(
    ("kind", "settings", "spec", "words"),
    [
        ("deepseek_v3", {}, "alibi", r"attention \(MLA\)"),
        ("gemma4_text", SHARED, "3*alibi,t5", "layer 3 of this model has no keys of its own"),
        ("gemma4_text", SHARED, "deberta_v2", "layer 3 of this model has no keys of its own"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(kind, settings, spec, words):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**SIZES, **settings))
    with pytest.raises(UserError, match=words):
        set_positions(model, spec)


def test_an_older_transformers_is_refused(monkeypatch):
    monkeypatch.setattr(replacing.transformers, "__version__", "5.7.0rc1")
    with pytest.raises(UserError, match=r"install transformers 5\.8 or later, not 5\.7\.0rc1"):
        set_positions(MODELS["llama"].build(), "alibi")
