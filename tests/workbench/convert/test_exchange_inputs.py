"""What exported models are given is used, or refused in a line that says what to do."""

from __future__ import annotations

import importlib
import weakref

import pytest
import torch
import transformers
from transformers.cache_utils import DynamicCache, EncoderDecoderCache, StaticCache

from fairseq_posenc.workbench.convert.exchange.config_json import ARCHITECTURES
from tests.helpers.exchanged import SPECS, exported_inputs, exported_model, head_of
from tests.helpers.products import product_of, some_of

OF_ENDS = ("documents", "sentence_learned")
DECODERS = ("causal_lm", "translation")
MODELS = {"causal_lm": "rope+alibi", "translation": "learned+t5"}
OF_VECTORS = [
    spec for spec in SPECS if "(" not in spec and ("+" not in spec or spec.startswith("rope+"))
]
CACHED = [
    *("xpos+alibi", "rope+sink(value=0.5)", "rope+window(size=4),none+ssmax", "fox", "cope"),
    *("alibi+chunk(size=3)", "learned+rope+randomized(limit=60)", "m4m+logn(length=4)"),
    "t5+window(size=3,first=2)",
]


def model_of(head):
    return exported_model(head, MODELS.get(head, "rope+m4m"))


def refused(model, match, **given):
    """Check that a call is refused in one line."""
    with pytest.raises(ValueError, match=match) as found:
        model(**given)
    assert "\n" not in str(found.value)


def with_each_head(cases):
    """Return cases for each head; a translation model, which has two stacks, has all of them."""
    others = [head for head in ARCHITECTURES if head != "translation"]
    return product_of(["translation"], cases) + product_of(others, cases)


# Name of an argument, a value made from the tokens, and what the line says.
ARGUMENTS = [
    ("position_ids", lambda x: torch.arange(9).expand(3, 9), "a row of its own, padded"),
    ("position_ids", lambda x: torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 1]] * 3), "a row of its own"),
    ("cache_position", lambda x: torch.arange(9), "a row of its own"),
    ("cu_seq_lens_q", lambda x: torch.tensor([0, 4, 9]), "a row of its own"),
    ("token_type_ids", torch.ones_like, "only zeros"),
    ("head_mask", lambda x: torch.ones(2, 4), "no head can be masked"),
    ("label", lambda x: x, "label cannot be given: no such argument"),
    ("attention_masks", lambda x: x, "attention_masks cannot be given"),
    ("caching", lambda x: False, "caching cannot be given"),
    ("logits_to_keep", lambda x: 1, "logits_to_keep cannot be given"),
]


@pytest.mark.parametrize(("head", "name", "make", "match"), product_of(ARCHITECTURES, ARGUMENTS))
def test_an_argument_that_would_change_nothing_is_refused_by_name(head, name, make, match):
    inputs = exported_inputs(head)
    refused(
        model_of(head),
        f"{name} cannot.*{match}|{match}",
        **inputs,
        **{name: make(inputs["input_ids"])},
    )


@pytest.mark.parametrize("head", ["masked_lm", "classes", "spans"])
def test_an_encoder_has_no_cache(head):
    refused(model_of(head), "has no cache", **exported_inputs(head), past_key_values=DynamicCache())


@pytest.mark.parametrize("head", ARCHITECTURES)
def test_what_changes_nothing_may_be_given(head):
    model, inputs = model_of(head), exported_inputs(head)
    harmless = {"position_ids": None, "head_mask": None, "use_cache": False, "return_dict": True}
    zeros = torch.zeros_like(inputs["input_ids"])
    found, wanted = model(**inputs, **harmless, token_type_ids=zeros), model(**inputs)
    assert list(found) == list(wanted)
    assert torch.equal(found[0], wanted[0])


@pytest.mark.parametrize("head", ARCHITECTURES)
def test_outputs_are_those_that_are_asked_for(head):
    """By an argument, and by the configuration."""
    model, inputs = model_of(head), exported_inputs(head)
    plain = model(**inputs)
    asked = {"output_attentions": True, "output_hidden_states": True}
    found = model(**inputs, **asked)
    side = "decoder_" if head == "translation" else ""
    assert len(found[f"{side}hidden_states"]) == 3
    assert found[f"{side}attentions"][0].shape == (3, 4, 9, 9)
    assert not any("hidden_states" in name or "attentions" in name for name in plain)
    model.config.output_hidden_states = True
    assert len(model(**inputs)[f"{side}hidden_states"]) == 3
    assert f"{side}hidden_states" not in model(**inputs, output_hidden_states=False)
    rows = model(**inputs, output_hidden_states=False, return_dict=False)
    assert isinstance(rows, tuple)
    assert torch.equal(rows[0], plain[0])


@pytest.mark.parametrize("is_asked", [False, True])
def test_states_of_layers_are_kept_only_to_be_returned(is_asked):
    """Else a long text would need memory for the states of all layers at the same time."""
    model = exported_model("masked_lm", "rope")
    first, alive = [], []
    model.encoder.layers[0].register_forward_hook(
        lambda *call: first.append(weakref.ref(call[-1][0]))
    )
    model.encoder.layer_norm.register_forward_pre_hook(
        lambda *call: alive.append(first[0]() is not None)
    )
    with torch.no_grad():
        model(**exported_inputs("masked_lm"), output_hidden_states=is_asked)
    assert alive == [is_asked]


# A mask made from one that is right, and what the line says.
MASKS = [
    (lambda x: x[:, :4], r"must be \(3, 9\)"),
    (lambda x: x[:2], r"must be \(3, 9\)"),
    (lambda x: x[:1], r"must be \(3, 9\)"),
    (lambda x: x.T, r"must be \(3, 9\)"),
    (lambda x: x[0], r"bool or whole numbers"),
    (lambda x: x[:, None], "bool or whole numbers"),
    (lambda x: x[:, None, None].expand(3, 1, 9, 9), "bool or whole numbers"),
    (lambda x: x.float(), "bool or whole numbers"),
    (lambda x: torch.where(x.bool(), 0.0, -torch.inf), "bool or whole numbers"),
    (lambda x: x.tolist(), "not list"),
    (lambda x: {"full_attention": x}, "not dict"),
    (lambda x: x * 2, "0 for padding and 1 elsewhere"),
    (lambda x: -x, "0 for padding and 1 elsewhere"),
]


@pytest.mark.parametrize(("head", "make", "match"), with_each_head(MASKS))
def test_masks_are_checked(head, make, match):
    inputs = exported_inputs(head)
    refused(model_of(head), match, **{**inputs, "attention_mask": make(inputs["attention_mask"])})
    if head == "translation":
        bad = {"decoder_attention_mask": make(inputs["attention_mask"])}
        refused(model_of(head), f"decoder_attention_mask.*{match}", **inputs, **bad)


@pytest.mark.parametrize("head", ARCHITECTURES)
def test_masks_of_every_whole_type_are_the_same(head):
    model, inputs = model_of(head), exported_inputs(head, "left")
    wanted = model(**inputs)[0]
    for dtype in (torch.bool, torch.int32, torch.uint8):
        mask = inputs["attention_mask"].to(dtype)
        assert torch.equal(model(**{**inputs, "attention_mask": mask})[0], wanted)
    del inputs["attention_mask"]
    assert torch.equal(model(**inputs)[0], wanted)


IDS = [
    (lambda x: x - 10, "hold -9: symbols are numbers from 0 on"),
    (lambda x: x.masked_fill(x.eq(1), -100), "hold -100: .*-100 is for labels alone"),
    (lambda x: x[0], "int64 or int32"),
    (lambda x: x[None], "int64 or int32"),
    (lambda x: x.float(), "int64 or int32"),
    (lambda x: x.bool(), "int64 or int32"),
    (lambda x: x.tolist(), "not list"),
    (lambda x: x[:0], "are empty"),
    (lambda x: x[:, :0], "are empty"),
    (lambda x: None, "no tokens: give"),
]


@pytest.mark.parametrize(("head", "make", "match"), with_each_head(IDS))
def test_symbols_are_checked(head, make, match):
    inputs = exported_inputs(head)
    mask = inputs.pop("attention_mask")
    tokens = inputs["input_ids"]
    refused(model_of(head), match, **{**inputs, "input_ids": make(tokens)})
    if head == "translation":
        bad = {**inputs, "decoder_input_ids": make(tokens), "attention_mask": mask}
        refused(model_of(head), match.replace("no tokens: give", "decoder_input_ids"), **bad)
        refused(
            model_of(head), "the decoder is given 2", **{**inputs, "decoder_input_ids": tokens[:2]}
        )


@pytest.mark.parametrize("head", ["masked_lm", "causal_lm", "translation"])
def test_labels_are_checked_and_may_be_pieces_without_a_symbol(head):
    model, inputs = model_of(head), exported_inputs(head)
    tokens = inputs["input_ids"]
    for bad in (tokens.T, tokens[:, :4], tokens.float(), tokens[:2], tokens.tolist()):
        given = {**inputs, "labels": bad}
        refused(model, "must be int64", **given)
    unknown = model(**inputs, labels=tokens.masked_fill(tokens.eq(1), 3)).loss
    assert torch.equal(model(**inputs, labels=tokens.masked_fill(tokens.eq(1), 999)).loss, unknown)


@pytest.mark.parametrize("head", ARCHITECTURES)
def test_losses_of_batches_add_up_to_that_of_all(head):
    """``num_items_in_batch`` is how the trainer of transformers accumulates gradients."""
    model, inputs = model_of(head), exported_inputs(head)
    tokens = inputs["input_ids"]
    if head == "spans":
        inputs |= {"start_positions": torch.zeros(3).long(), "end_positions": torch.ones(3).long()}
    elif head == "classes":
        inputs["labels"] = torch.tensor([0, 1, 1])
    else:
        inputs["labels"] = tokens.masked_fill(tokens.eq(1), -100)
    kept = inputs.get("labels", torch.zeros(3))
    items = kept[:, 1:].ne(-100).sum() if head == "causal_lm" else kept.ne(-100).sum()
    whole = model(**inputs).loss
    rows = [{name: value[row : row + 1] for name, value in inputs.items()} for row in range(3)]
    parts = sum(model(**row, num_items_in_batch=items).loss for row in rows)
    torch.testing.assert_close(parts, whole)


def test_a_score_is_compared_with_as_many_numbers():
    model, inputs = exported_model("classes", "rope"), exported_inputs("classes")
    model.config.num_labels = 1
    model.classifier.out_proj = torch.nn.Linear(32, 1)
    numbers = torch.tensor([0.5, -1.0, 2.0])
    rows, column = (model(**inputs, labels=x).loss for x in (numbers, numbers[:, None]))
    torch.testing.assert_close(rows, (model(**inputs).logits.flatten() - numbers).square().mean())
    assert torch.equal(rows, column)
    refused(model, "must be 3 numbers", **inputs, labels=numbers[:2])


def with_embeds(model, inputs):
    """Return inputs with vectors in place of symbols."""
    given = dict(inputs)
    given["inputs_embeds"] = model.get_input_embeddings()(given.pop("input_ids"))
    return given


@pytest.mark.parametrize(
    ("head", "spec", "side"),
    product_of(
        [
            *((head_of(spec), spec) for spec in some_of(OF_VECTORS, SPECS)),
            *((head, "rope+m4m") for head in ARCHITECTURES),
            *(("translation", spec) for spec in ("learned+t5", "m4+rope(cross_attention=true)")),
        ],
        ["left", "right"],
    ),
)
def test_vectors_in_place_of_symbols_compute_the_same(head, spec, side):
    """Only positions by the ends of sentences need the symbols, too."""
    model, inputs = exported_model(head, spec), exported_inputs(head, side)
    given = with_embeds(model, inputs)
    if any(name in spec for name in OF_ENDS):
        refused(model, "inputs_embeds do not show: give input_ids", **given)
        given["prefix_ids"] = inputs["input_ids"]
    wanted, found = model(**inputs), model(**given)
    real = inputs["attention_mask"].bool()
    for name in ("start_logits",) if head == "spans" else ("logits",):
        kept = slice(None) if head == "classes" else real
        torch.testing.assert_close(found[name][kept], wanted[name][kept])


@pytest.mark.parametrize("head", ARCHITECTURES)
def test_vectors_are_trained_through_and_checked(head):
    model, inputs = model_of(head), exported_inputs(head)
    given = with_embeds(model, inputs)
    embeds = given["inputs_embeds"].detach().requires_grad_()
    labels = {"labels": torch.tensor([0, 1, 1])} if head == "classes" else {}
    if head == "spans":
        labels = dict.fromkeys(("start_positions", "end_positions"), torch.ones(3).long())
    elif head != "classes":
        labels = {"labels": inputs["input_ids"]}
    loss = model(**{**given, "inputs_embeds": embeds}, **labels).loss
    torch.testing.assert_close(loss, model(**inputs, **labels).loss)
    loss.backward()
    assert embeds.grad.abs().sum() > 0
    refused(model, "not both", **inputs, inputs_embeds=embeds)
    for bad in (embeds[..., :7], embeds[0], embeds.long(), embeds.tolist()):
        refused(model, "inputs_embeds must be floats", **{**given, "inputs_embeds": bad})
    refused(model, "are empty", **{**given, "inputs_embeds": embeds[:, :0]})
    if head == "translation":
        vectors = model.decoder.embed_tokens(inputs["decoder_input_ids"])
        found = model(**{**inputs, "decoder_input_ids": None}, decoder_inputs_embeds=vectors)
        mask = inputs["attention_mask"].bool()
        torch.testing.assert_close(found.logits[mask], model(**inputs).logits[mask])
        refused(model, "not both", **inputs, decoder_inputs_embeds=vectors)


@pytest.mark.parametrize(("spec", "use_cache", "beams"), product_of(CACHED, [True, False], [1, 3]))
def test_generation_from_vectors_is_that_from_symbols(spec, use_cache, beams):
    model, inputs = exported_model("causal_lm", spec), exported_inputs("causal_lm", "left")
    search = {"max_new_tokens": 6, "num_beams": beams, "do_sample": False, "use_cache": use_cache}
    wanted = model.generate(**inputs, **search)
    given = with_embeds(model, inputs)
    assert torch.equal(model.generate(**given, **search), wanted[:, 9:])
    both = model.generate(**given, input_ids=inputs["input_ids"], **search)
    assert torch.equal(both, wanted)


@pytest.mark.parametrize("beams", [1, 3])
def test_translation_of_vectors_is_that_of_symbols(beams):
    model = model_of("translation")
    inputs = exported_inputs("translation", "left")
    del inputs["decoder_input_ids"]
    search = {"max_new_tokens": 6, "num_beams": beams}
    found = model.generate(**with_embeds(model, inputs), **search)
    assert torch.equal(found, model.generate(**inputs, **search))


def other_caches(config):
    """Yield a cache of each kind that would hold other keys than the model needs."""
    yield StaticCache(config=config, max_cache_len=20)
    yield DynamicCache(config=config, offloading=True)
    for name in ("OffloadedCache", "SlidingWindowCache", "HybridCache", "OffloadedStaticCache"):
        kind = getattr(importlib.import_module("transformers.cache_utils"), name, None)
        if kind is not None:
            options = {} if name == "OffloadedCache" else {"max_cache_len": 20, "config": config}
            yield kind(**options)
    windows = transformers.PretrainedConfig(
        num_hidden_layers=2, sliding_window=2, layer_types=["sliding_attention"] * 2
    )
    yield DynamicCache(config=windows)
    yield ((torch.zeros(3, 4, 2, 8),) * 2,) * 2


@pytest.mark.parametrize("spec", CACHED)
def test_caches_of_another_kind_are_refused(spec):
    model, inputs = exported_model("causal_lm", spec), exported_inputs("causal_lm")
    for cache in other_caches(model.config):
        refused(model, "Dynamic", **inputs, past_key_values=cache)
        refused(model, "Dynamic", **inputs, cache=cache)
    both = EncoderDecoderCache(DynamicCache(), DynamicCache())
    refused(model, "this model needs DynamicCache", **inputs, past_key_values=both)
    refused(model, "not both", **inputs, past_key_values=DynamicCache(), cache=DynamicCache())
    for kind in ("static", "offloaded"):
        with pytest.raises(ValueError, match="Dynamic"):
            model.generate(**inputs, max_new_tokens=2, cache_implementation=kind)


def test_caches_of_a_translation_model_are_two():
    model, inputs = model_of("translation"), exported_inputs("translation")
    refused(model, "EncoderDecoderCache", **inputs, past_key_values=DynamicCache())
    for cache in other_caches(model.config):
        if not isinstance(cache, tuple):
            for pair in ((cache, DynamicCache()), (DynamicCache(), cache)):
                refused(model, "Dynamic", **inputs, past_key_values=EncoderDecoderCache(*pair))


@pytest.mark.parametrize("head", DECODERS)
def test_a_cache_is_of_these_sentences_and_all_tokens(head):
    model, inputs = model_of(head), exported_inputs(head)
    step = "decoder_input_ids" if head == "translation" else "input_ids"
    cache = model(**inputs, use_cache=True).past_key_values
    new = torch.full((3, 1), 7)
    prefix = torch.cat([inputs[step], new], 1)
    one = {step: new, "prefix_ids": prefix, "past_key_values": cache}
    if head == "translation":
        one |= {name: inputs[name] for name in ("input_ids", "attention_mask")}
    two = {name: value[:2] for name, value in one.items() if name != "past_key_values"}
    refused(model, "the cache is of 3 sentences, and 2 are given", **two, past_key_values=cache)
    refused(model, "9 tokens are in the cache", **{**one, "prefix_ids": new})
    refused(model, "9 tokens are in the cache", **{**one, "prefix_ids": None})
    mask = "decoder_attention_mask" if head == "translation" else "attention_mask"
    refused(model, r"must be \(3, 10\)", **one, **{mask: torch.ones(3, 1).long()})
    whole = model(**{**inputs, step: prefix, "attention_mask": None}).logits[:, -1:]
    torch.testing.assert_close(model(**one).logits, whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("spec", CACHED)
def test_a_search_reads_each_token_once(spec, monkeypatch):
    """Whatever name transformers has for the cache."""
    model, inputs = exported_model("causal_lm", spec), exported_inputs("causal_lm", "left")
    lengths, forward = [], type(model).forward

    def count(self, input_ids=None, **given):
        lengths.append(input_ids.size(1))
        return forward(self, input_ids, **given)

    monkeypatch.setattr(type(model), "forward", count)
    model.generate(**inputs, min_new_tokens=3, max_new_tokens=3)
    assert lengths == [9, 1, 1]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"position_ids": torch.arange(9).expand(3, 9)}, "position_ids"),
        ({"token_type_ids": torch.ones(3, 9).long()}, "token_type_ids"),
        ({"attention_masks": torch.ones(3, 9)}, "attention_masks"),
    ],
)
def test_generate_refuses_what_it_would_not_use(options, match):
    with pytest.raises(ValueError, match=match):
        model_of("causal_lm").generate(**exported_inputs("causal_lm"), max_new_tokens=2, **options)


def test_a_prompt_read_in_pieces_is_refused():
    inputs = exported_inputs("causal_lm")
    with pytest.raises(ValueError, match=r"position_ids cannot be given|no prefill_chunk_size"):
        model_of("causal_lm").generate(**inputs, max_new_tokens=2, prefill_chunk_size=3)


def test_padding_of_a_target_is_heard_of_in_a_search():
    model, inputs = model_of("translation"), exported_inputs("translation", "left")
    target = torch.tensor([[1, 2, 9], [2, 8, 7], [1, 1, 2]])
    inputs["decoder_input_ids"] = target
    search = {"max_new_tokens": 4, "num_beams": 1, "do_sample": False}
    padded = model.generate(**inputs, decoder_attention_mask=target.ne(1).long(), **search)
    alone = model.generate(
        **{name: x[:1] for name, x in inputs.items() if name != "decoder_input_ids"},
        decoder_input_ids=target[:1, 1:],
        **search,
    )
    assert torch.equal(padded[0, 1 : alone.size(1) + 1], alone[0])
