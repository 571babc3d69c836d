"""Every encoding in models of every family: the same logits, whatever the way to them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import functional as F
from transformers import StaticCache

from fairseq_posenc.errors import UserError
from fairseq_posenc.hf import read_positions, set_positions
from fairseq_posenc.registry import names
from fairseq_posenc.specs import parse
from tests.helpers.hf_models import (
    CACHE,
    MODELS,
    POSITIONS,
    Cell,
    checks_of,
    compute_logits,
    distance,
    make_inputs,
    position_parameters,
)
from tests.helpers.products import product_of, some_of

COMBINED = [
    "3*rope(layout=half),none",
    "rope+alibi",
    "rope(layout=half)+window(size=5)",
    "alibi+window(size=4,first=2)",
    "learned+window(size=4)+sink",
    "rope+window(size=3),alibi+window(size=6),none",
    "t5+chunk(size=6)",
    "rope(layout=half,fraction=0.5)",
    "rope+ssmax",
    "alibi+logn",
    "m4m+reset",
    "rope+softcap(cap=2)",
    "fox+window(size=4),inkling,rope+fox,none",
]
DECODERS = [name for name in MODELS if MODELS[name].generates and not MODELS[name].has_encoder]
ENCODERS = [name for name in MODELS if name not in DECODERS]
SPECS = [*names(), *COMBINED]


def is_causal_only(spec: str) -> bool:
    return not set(spec.replace("(", "+").split("+")) & set(names()) <= set(names(encoder=True))


CELLS = product_of(DECODERS, SPECS)
OF_ENCODERS = [spec for spec in SPECS if not is_causal_only(spec)]
CELLS += product_of(ENCODERS, some_of(["learned", "m4m", "rope", *COMBINED[:5]], OF_ENCODERS))
CELLS = [*dict.fromkeys([*CELLS, ("marian", "fox")])]  # an attention that does not know its number


@pytest.mark.parametrize(("name", "spec"), CELLS)
def test_cell(name, spec):
    cell = Cell.build(name, spec)
    for check, compute in checks_of(cell):
        result = compute()
        assert result is True or (result is not False and result < 2e-5), (check, result)
    assert not [n for n, grad in cell.gradients().items() if ".positions." in n and not grad.any()]


@pytest.mark.parametrize("name", MODELS)
def test_own_positions_are_read_as_a_spec_and_none_are_other_ones(name):
    tiny = MODELS[name]
    model, inputs = tiny.build(), make_inputs(tiny)
    before = compute_logits(model, inputs)
    assert read_positions(model) == str(parse(tiny.positions))
    set_positions(model, "none")
    assert distance(compute_logits(model, inputs), before) > 1e-2
    assert not position_parameters(model)


@pytest.mark.parametrize(
    ("name", "spec", "reentrant"), product_of(MODELS, ["t5+learned", "m4m"], [False, True])
)
def test_gradients_are_the_same_with_checkpointing(name, spec, reentrant):
    cell = Cell.build(name, spec)
    torch.testing.assert_close(cell.gradients(reentrant), cell.gradients(), rtol=1e-4, atol=1e-5)


LEROPE = "lerope(layout=half)"  # which the model's own code applies, unless there is a bias


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "cohere2"])
@pytest.mark.parametrize("spec", [LEROPE, f"{LEROPE}+alibi", f"{LEROPE},lerope(base=50)+alibi"])
def test_gradients_reach_trained_frequencies(name, spec):
    cell = Cell.build(name, spec)
    expected = cell.gradients()
    trained = [key for key in expected if key.endswith("lerope.alpha")]
    assert trained
    for key in trained:
        assert expected[key].abs().min() > 0
        with torch.no_grad():
            alpha, step, losses = cell.model.get_parameter(key), 2e-2, []
            for change in (step, -2 * step):
                alpha[1] += change
                loss = cell.model(**cell.inputs, labels=cell.inputs["input_ids"]).loss
                losses.append(loss.double())
            alpha[1] += step
        slope = (losses[0] - losses[1]) / (2 * step)
        torch.testing.assert_close(expected[key][1].double(), slope, rtol=0.05, atol=2e-4)
    for again in (cell.gradients(reentrant) for reentrant in (False, True)):
        torch.testing.assert_close(again, expected, rtol=1e-4, atol=1e-5)


def test_a_later_pass_changes_no_rotation_that_is_computed_again():
    cell = Cell.build("gpt2", "rope(scaling=dynamic:2)")  # slower in texts longer than the trained
    expected = cell.gradients()
    torch.testing.assert_close(cell.gradients(True, later=99), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_bfloat16(name):
    cell = Cell.build(name, "rope+alibi")
    exact = compute_logits(cell.model, cell.inputs)
    inputs = {k: x.bfloat16() if x.is_floating_point() else x for k, x in cell.inputs.items()}
    logits = compute_logits(cell.model.to(torch.bfloat16), inputs)
    assert logits.dtype == torch.bfloat16
    assert distance(logits.float(), exact) < 0.1


def test_caches_forget_what_windows_hide():
    layers = "rope(layout=half)+window(size=5),window(size=3),window(prefill=true),none"
    cell = Cell.build("llama", layers)
    cache = cell.model(**cell.inputs, use_cache=True)[CACHE]
    assert [layer.keys.size(2) for layer in cache.layers] == [4, 4, 12, 12]


@pytest.mark.parametrize(
    ("name", "spec", "words"),
    [
        ("llama", "rope(cross_attention=true)", "cross_attention"),
        ("llama", "4*rope,none", "the stack has 4"),
        ("llama", "nonsense", "unknown position encoding"),
        ("llama", "own(base=500", "the brackets of .* do not match"),
        ("llama", None, "spec is text"),
        ("t5", "own+cope", "for causal models: an encoder-decoder takes it as dec"),
        ("whisper", "own", "decoder_spec: only one stack of this model has positions"),
    ],
)
def test_refused_and_left_as_it_was(name, spec, words):
    model, inputs = MODELS[name].build(), make_inputs(MODELS[name])
    before = compute_logits(model, inputs)
    with pytest.raises(UserError, match=words):
        set_positions(model, spec, decoder_spec="alibi" if name == "whisper" else None)
    assert torch.equal(compute_logits(model, inputs), before)
    assert not hasattr(model.config, "position_encoding")


@pytest.mark.parametrize("size", [0, -1, 1.5, "64", True])
def test_sizes_that_are_no_numbers_of_positions_are_refused(size):
    with pytest.raises(UserError, match="max_positions must be a whole number"):
        set_positions(MODELS["llama"].build(), "learned", max_positions=size)


LONG = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}


@pytest.mark.parametrize("spec", ["own", "own+window(size=200)"])
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("phi3", {"original_max_position_embeddings": 16, "rope_scaling": LONG}),
        ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}),
    ],
)
def test_rotations_that_depend_on_the_input_are_those_of_the_stock_model(name, settings, spec):
    tiny = MODELS[name]
    model = set_positions(copy.deepcopy(tiny.build(**settings)), spec)
    for length in (16, 17, 80, POSITIONS + 1, 12):
        inputs = make_inputs(tiny, length=length)
        ids = torch.arange(length)[None] + (length == 12)
        for named in (inputs, {**inputs, "position_ids": ids}):
            stock_again = tiny.build(**settings)  # it remembers longer inputs
            assert distance(compute_logits(model, named), compute_logits(stock_again, named)) < 1e-5


def test_inputs_of_a_pass_that_cannot_be_served_are_refused():
    cell, with_gap = Cell.build("llama", "alibi+window"), torch.arange(12).expand(2, 12).ne(5)
    ids = cell.inputs["input_ids"]
    for named, words in [
        ({"attention_mask": with_gap}, "^attention_mask: padding lies between tokens, and alibi"),
        ({"attention_mask": torch.ones(2, 1, 12, 12)}, "1 for tokens and 0 for padding"),
        ({"attention_mask": torch.ones(2, 11)}, r"must be \(2, 12\)"),
        ({"position_ids": torch.arange(12)[None] % 5}, "several documents"),
        ({"position_ids": torch.arange(11)[None]}, r"\(1, 11\) must be \(2 or 1, 12\)"),
        ({"document_ids": torch.zeros(2, 12)}, "document_ids: pass position_ids that begin at 0"),
    ]:
        with pytest.raises(UserError, match=words):
            cell.model(input_ids=ids, **named)
    with pytest.raises(UserError, match=r"input_ids \(2, 1, 12\) must be a batch of texts"):
        Cell.build("gpt2", "alibi").model(ids[:, None])  # texts of several choices
    encoder = set_positions(MODELS["roberta"].build(pad_token_id=1), "alibi")
    with pytest.raises(UserError, match="position_ids of this model count from 2"):
        encoder(ids, position_ids=torch.arange(12)[None])
    padded = {"input_ids": ids, "attention_mask": (torch.arange(12) < 10).long().expand(2, 12)}
    given = {**padded, "position_ids": torch.tensor([[*range(2, 12), 1, 1]])}  # 1: of padding
    assert distance(*[compute_logits(encoder, named)[:, :10] for named in (padded, given)]) < 1e-6
    with pytest.raises(UserError, match="a fixed size: set rotations of the stock layout"):
        cell.model.generate(ids, max_new_tokens=4, cache_implementation="static")
    with pytest.raises(UserError, match="fox: offloaded caches lose forget gates: use"):
        Cell.build("llama", "fox").model.generate(ids, cache_implementation="offloaded")
    cell.model.set_attn_implementation("eager")
    with pytest.raises(UserError, match="leaves its positions out"):
        cell.model(ids)


@pytest.mark.parametrize("spec", ["alibi", "m4m", "t5+rope", "learned+fire", "own"])
@pytest.mark.parametrize("grows", [True, False])
def test_position_ids_are_where_tokens_stand(spec, grows):
    model = Cell.build("llama", spec).model
    ids = torch.randint(3, 40, (2, 8))
    places = torch.tensor([[0, 2, 3, 7, 8, 9, 11, 12], [1, 2, 3, 4, 6, 6, 7, 9]])
    if not grows:  # as in a tree
        places = torch.tensor([[0, 2, 1, 7, 7, 4, 11, 0], [9, 2, 0, 4, 6, 6, 1, 5]])
    full = compute_logits(model, {"input_ids": ids, "position_ids": places})
    assert distance(full, compute_logits(model, {"input_ids": ids})) > 1e-3
    for row in range(2):
        alone = {"input_ids": ids[[row]], "position_ids": places[[row]]}
        assert distance(compute_logits(model, alone), full[[row]]) < 2e-5
    named = {"input_ids": ids, "position_ids": places, "use_cache": False}
    assert distance(compute_logits(model, named), full) < 2e-5
    named = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    padded = {name: F.pad(x, (3, 0)) for name, x in named.items()}
    padded["position_ids"] = F.pad(places, (3, 0), value=1)
    assert distance(compute_logits(model, padded)[:, 3:], full) < 2e-5


@pytest.mark.parametrize(
    "spec", ["rope(sections=2/2,layout=half)", "t5(axes=2)", "learned(axes=2)+rope(axes=2)"]
)
def test_position_ids_on_several_axes(spec):
    model = Cell.build("llama", spec).model
    ids = torch.randint(3, 40, (2, 6))
    places = torch.tensor([[[0, 1, 2, 3, 3, 3]], [[0, 1, 2, 3, 4, 5]]])
    full = compute_logits(model, {"input_ids": ids, "position_ids": places})
    text = compute_logits(model, {"input_ids": ids})
    assert distance(full, text) > 1e-3
    equal = torch.arange(6).expand(2, 1, 6)
    assert distance(compute_logits(model, {"input_ids": ids, "position_ids": equal}), text) < 1e-5
    with pytest.raises(UserError, match=r"are on 3 axes, and .* has 2"):
        model(ids, position_ids=torch.arange(6).expand(3, 1, 6))


def test_columns_of_a_grid_are_not_documents():
    """The first axis counts from 0 in each row, as the tokens of packed documents do."""
    model = Cell.build("llama", "rope(axes=2,layout=half)").model
    tokens = torch.randint(3, 40, (2, 6))
    columns, rows = torch.tensor([0, 1, 2, 0, 1, 2]), torch.tensor([0, 0, 0, 1, 1, 1])
    inputs = {"input_ids": tokens, "position_ids": torch.stack([columns, rows])[:, None]}
    masked = compute_logits(model, {**inputs, "attention_mask": torch.ones_like(tokens)})
    assert distance(compute_logits(model, {**inputs, "use_cache": False}), masked) < 1e-6


def test_attention_weights_are_returned_where_they_are_asked_for():
    cell = Cell.build("llama", "alibi+sink")
    out = cell.model(**cell.inputs, output_attentions=True)
    assert [weights.shape for weights in out.attentions] == [(2, 4, 12, 12)] * 4
    sums = out.attentions[0].sum(-1)
    assert 0 < sums.min() <= sums.max() < 1


@pytest.mark.parametrize("spec", ["rope(layout=half)", "3*rope(base=500,layout=half),none", "none"])
def test_rotations_alone_leave_attention_and_caches_to_transformers(spec):
    cell = Cell.build("llama", spec)
    assert cell.model.config._attn_implementation == "sdpa"
    settings = {**cell.inputs, "max_new_tokens": 6, "do_sample": False}
    static = cell.model.generate(**settings, cache_implementation="static", disable_compile=True)
    assert torch.equal(static, cell.model.generate(**settings))
    logits, ids = compute_logits(cell.model, cell.inputs), cell.inputs["input_ids"]
    step = torch.compile(cell.model, backend="eager", fullgraph=True)  # reads no tensor's value
    cache = StaticCache(config=cell.model.config, max_cache_len=16)
    compute_logits(cell.model, {"input_ids": ids[:, :-1]}, past_key_values=cache)
    last = compute_logits(step, {"input_ids": ids[:, -1:]}, past_key_values=cache)
    assert distance(last, logits[:, -1:]) < 1e-5
    cell.model.set_attn_implementation("eager")
    assert distance(compute_logits(cell.model, cell.inputs), logits) < 1e-5
    cell.model.set_attn_implementation("fairseq_posenc")  # ours computes rotations as well
    assert distance(compute_logits(cell.model, cell.inputs), logits) < 1e-5
    set_positions(cell.model, f"{spec}+alibi".replace("none+", ""))  # attention is ours again
    assert cell.model.config._attn_implementation == "fairseq_posenc"
    set_positions(cell.model, spec)
    assert distance(compute_logits(cell.model, cell.inputs), logits) < 1e-5
    assert cell.model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("name", MODELS)
def test_inputs_longer_than_the_models_own_limit(name):
    inputs = make_inputs(MODELS[name], length=POSITIONS + 20)
    for spec in ("none", "alibi"):  # with the model's own attention, or ours
        cell = Cell.build(name, spec)
        assert bool(compute_logits(cell.model, inputs).isfinite().all())
    with pytest.raises(UserError, match="longer than the 64 positions of 'learned'"):
        set_positions(cell.model, "learned", max_positions=POSITIONS)(**inputs)
