"""Positions that no call, copy or cache bypasses: the numbers of the call, or a line."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers.models.llama.modeling_llama import LlamaAttention

from fairseq_posenc.errors import UserError
from fairseq_posenc.hf import read_positions, set_positions
from tests.helpers.hf_models import CACHE, MODELS, Cell, compute_logits, distance, make_inputs
from tests.helpers.products import product_of, some_of

SPECS = ["own", "alibi", "3*own,none", "learned+documents"]
TOKENS = torch.arange(3, 15)[None]


def replicate(module: nn.Module) -> nn.Module:
    """Copy a module as ``DataParallel`` does: the copy has tensors in place of parameters."""
    copied: nn.Module = module._replicate_for_data_parallel()
    weights = module._parameters.items()
    vars(copied).update({name: x if x is None else x.clone() for name, x in weights})
    copied._modules = {name: replicate(x) for name, x in module._modules.items() if x is not None}
    return copied


COMPILED = some_of(["alibi"], ["own", "alibi"])


@pytest.mark.parametrize(("spec", "name"), product_of(SPECS, ["llama", "bert"]))
def test_forward_and_its_copies_give_what_the_call_gives(name: str, spec: str) -> None:
    cell = Cell.build(name, spec, num_hidden_layers=4 if "," in spec else 2)
    expected = compute_logits(cell.model, cell.inputs)
    base = copy.deepcopy(cell.model.base_model)
    for model in (cell.model, pickle.loads(pickle.dumps(cell.model)), replicate(cell.model)):
        assert distance(model.forward(**cell.inputs).logits, expected) < 1e-6
    hidden = base(**cell.inputs)[0]
    ways = [base.forward, torch.compile(base.forward, backend="eager")]
    for forward in ways if spec in COMPILED else ways[:1]:  # each model compiled once
        assert distance(forward(**cell.inputs)[0], hidden) < 1e-5


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("name", ["llama", "bert", "gpt2", "bart"])
def test_a_part_that_is_called_by_itself_refuses(name: str, spec: str) -> None:
    model = Cell.build(name, spec).model
    x = torch.zeros(1, 3, 32)
    for part in model.modules():
        if type(part).__name__ in ("NoRotation", "NoPositions", "LlamaAttention"):
            for call in (part, part.forward):
                with pytest.raises(UserError, match="called by itself"):
                    call(x, torch.arange(3)[None])


def test_code_that_reads_cosines_in_a_pass_gets_those_of_the_stock_model() -> None:
    model, read = MODELS["llama"].build(), []
    for _ in range(2):
        hook = model.base_model.rotary_emb.register_forward_hook(lambda *call: read.append(call[2]))
        model(TOKENS)
        hook.remove()
        set_positions(model, "own")
    assert all(distance(ours, theirs) < 1e-6 for theirs, ours in zip(*read, strict=True))


@pytest.mark.parametrize("spec", ["alibi", "rope(layout=half,base=500)"])
def test_models_of_the_same_configuration_are_left_alone(spec: str) -> None:
    config = MODELS["llama"].build().config
    taught, other = (transformers.LlamaForCausalLM(config).eval() for _ in range(2))
    before = other(TOKENS).logits
    set_positions(taught, spec)
    assert read_positions(other) == "rope(layout=half)"
    assert torch.equal(other(TOKENS).logits, before)
    if spec == "alibi":  # which a stock class cannot compute, unlike its own kind of rotation
        with pytest.raises(UserError, match="positions were set with all layers"):
            transformers.LlamaForCausalLM(copy.deepcopy(taught.config))(TOKENS)
    again = transformers.AutoModelForCausalLM.from_config(taught.config).eval()
    again.load_state_dict(taught.state_dict())
    assert torch.equal(again(TOKENS).logits, taught(TOKENS).logits)
    with pytest.raises(UserError, match="is a part: set the positions of its"):
        set_positions(MODELS["bart"].build().get_encoder(), "alibi")


@pytest.mark.parametrize("sliding_window", [None, 4])
def test_who_is_causal_is_read_as_in_transformers_masks(sliding_window: int | None) -> None:
    model = MODELS["mistral"].build(is_causal=False, sliding_window=sliding_window)
    before, positions = model(TOKENS).logits, read_positions(model)
    for spec in ("own", positions):
        assert distance(set_positions(model, spec)(TOKENS).logits, before) < 1e-5
    set_positions(model, "alibi")
    other = TOKENS.clone()
    other[:, -1] = 20
    assert not torch.equal(model(other).logits[:, 0], model(TOKENS).logits[:, 0])
    for setting in ({"is_causal": True}, {}):
        model.config.is_causal = not setting
        with pytest.raises(UserError, match="is_causal was False"):
            model(TOKENS, **setting)


@torch.no_grad()
def test_a_window_never_cuts_a_cross_attention_cache() -> None:
    model = MODELS["gpt2"].build(add_cross_attention=True)
    set_positions(model, "own+window(size=3)")
    named = {"encoder_hidden_states": torch.randn(1, 7, 32)}
    full = model(TOKENS, use_cache=False, **named).logits
    cache = model(TOKENS[:, :6], **named)[CACHE]
    assert distance(model(TOKENS[:, 6:], **named, **{CACHE: cache}).logits, full[:, 6:]) < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("settings", [{}, {"num_beams": 3}, {"prefill_chunk_size": 4}], ids=str)
@pytest.mark.parametrize("options", ["size=3", "size=3,first=2"])
def test_with_prefill_generated_tokens_see_the_whole_prompt(options: str, settings: Any) -> None:
    """Padded on the left, against the stock model with a mask of pairs, a row at a time."""
    stock = MODELS["llama"].build(eos_token_id=None).double()
    model = set_positions(copy.deepcopy(stock), f"own+window({options},prefill=true)")
    tokens, size = torch.cat([TOKENS, TOKENS.flip(1)]), 12
    mask = torch.arange(size) >= torch.tensor([[0], [3]])
    named = {"attention_mask": mask.long(), "max_new_tokens": 8, "do_sample": False, **settings}
    more = dict.fromkeys(["return_dict_in_generate", "output_logits", "output_scores"], True)
    out = model.generate(tokens, **named, **more)
    for row, left in enumerate((0, 3)):
        text = out.sequences[row, left:]
        i, j = torch.arange(len(text))[:, None], torch.arange(len(text))
        seen = (j <= i) & ((j > i - 3) | (j < 2 * ("first" in options)) | (i >= size - left))
        pairs = torch.zeros(1, 1, *seen.shape).double().masked_fill(~seen, -torch.inf)
        logits = stock(text[None], attention_mask=pairs).logits[0, size - left - 1 : -1]
        if "num_beams" in settings:
            chosen = logits.log_softmax(-1).gather(1, text[size - left :, None])
            found, expected = out.sequences_scores[row], chosen.mean()
        else:
            found, expected = torch.stack(out.logits, 1)[row], logits
        torch.testing.assert_close(found, expected.float(), rtol=1e-5, atol=1e-5)


def test_with_prefill_what_does_not_generate_token_by_token_is_refused() -> None:
    model = set_positions(MODELS["llama"].build(), "own+window(size=3,prefill=true)")
    wrong = {"use_cache": False, "prompt_lookup_num_tokens": 2, "assistant_model": model}
    for name, value in wrong.items():
        with pytest.raises(UserError, match="one by one, with a cache: leave out"):
            model.generate(TOKENS, **{name: value})
    with pytest.raises(UserError, match="prefill is for causal models"):
        set_positions(MODELS["bert"].build(), "own+window(prefill=true)")


@torch.no_grad()
@pytest.mark.parametrize("spec", ["rope(layout=half)", "alibi"])
def test_a_cache_of_earlier_windows_is_refused(spec: str) -> None:
    model = MODELS["mistral"].build(sliding_window=4)
    cache = {CACHE: transformers.DynamicCache(config=model.config)}
    set_positions(model, spec)
    with pytest.raises(UserError, match="make caches after set_positions"):
        [model(tokens, **cache) for tokens in TOKENS.split(6, 1)]
    with pytest.raises(UserError, match="is a list, not transformers' Cache"):
        model(TOKENS, **{CACHE: [TOKENS]})


@torch.no_grad()
@pytest.mark.parametrize("states_windows", [False, True])
def test_a_cache_that_is_rebuilt_from_keys_is_right_or_refused(states_windows: bool) -> None:
    model = Cell.build("llama", "own+window(size=4)").model
    full = model(TOKENS, use_cache=False).logits
    for count in (2, 3, 6):  # a window keeps 3
        cache, rest = model(TOKENS[:, :count])[CACHE], TOKENS[:, count:]
        keys = [(layer.keys, layer.values) for layer in cache.layers]
        named = {CACHE: transformers.DynamicCache(keys, model.config if states_windows else None)}
        if count > 2:
            with pytest.raises(UserError, match="a cache of 3 keys that this model did not fill"):
                model(rest, **named)
            named = {CACHE: copy.deepcopy(cache)}
        assert distance(model(rest, **named).logits, full[:, count:]) < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("spec", ["alibi", "fox", "own+window(size=4)"])
def test_layers_that_peft_replicates_have_positions(spec: str) -> None:
    peft = pytest.importorskip("peft", reason="needs PEFT")
    model = Cell.build("llama", spec).model
    config = peft.LoraConfig(target_modules=["q_proj"], layer_replication=[(0, 3), (1, 4)])
    replicated = peft.get_peft_model(model, config)
    if "window" in spec:
        with pytest.raises(UserError, match="layers were added: caches have 4, so pass"):
            replicated(TOKENS)
    full = replicated(TOKENS, use_cache=False).logits
    if "window" not in spec:
        cache = replicated(TOKENS[:, :8])[CACHE]
        assert distance(replicated(TOKENS[:, 8:], **{CACHE: cache}).logits, full[:, 8:]) < 1e-5


def test_an_assistant_may_generate_the_symbol_of_padding() -> None:
    model, named = Cell.build("llama", "alibi").model, {"max_new_tokens": 8, "do_sample": False}
    expected = model.generate(TOKENS, **named, eos_token_id=None)
    named |= {"pad_token_id": int(expected[0, 14]), "assistant_model": copy.deepcopy(model)}
    assert torch.equal(model.generate(TOKENS, **named, eos_token_id=None), expected)


def test_what_transformers_would_do_without_positions_is_refused() -> None:
    model = set_positions(MODELS["llama"].build(), "own")
    with pytest.raises(UserError, match="continuous batching"):
        model.generate_batch(TOKENS.tolist())
    with pytest.raises(UserError, match="generate without cache_implementation='paged'"):
        model.generate(TOKENS, cache_implementation="paged")
    pegasus = MODELS["marian"]._replace(model="PegasusModel", config="PegasusConfig").build()
    with pytest.raises(UserError, match=r"set_positions\(model, 'own', max_positions="):
        set_positions(pegasus, "alibi").resize_position_embeddings(128)


@torch.no_grad()
def test_a_cache_without_forget_gates_is_refused() -> None:
    model = Cell.build("llama", "none").model
    cache = model(TOKENS[:, :6])[CACHE]
    set_positions(model, "fox")
    with pytest.raises(UserError, match="lacks gates of 6 tokens: make it after"):
        model(TOKENS[:, 6:], **{CACHE: cache})


@torch.no_grad()
@pytest.mark.parametrize("spec", ["alibi", "m4m", "learned+t5", "fox+alibi", "own+window(size=9)"])
def test_tokens_after_a_cache_are_counted_or_refused(spec: str) -> None:
    model = Cell.build("llama", spec).model
    tokens = torch.randint(3, 90, (2, 8))
    ids = torch.tensor([[0, 2, 3, 7, 8, 9, 11, 12], [1, 2, 3, 4, 6, 6, 7, 9]])
    counted = torch.arange(8)[None]
    full = model(tokens, use_cache=False).logits
    for change, value, rows in (
        ("reorder_cache", torch.tensor([1, 0]), [1, 0]),
        ("batch_repeat_interleave", 2, [0, 0, 1, 1]),
        ("batch_select_indices", torch.tensor([1]), [1]),
        ("crop", -1, [0, 1]),
    ):
        begin = 4 if change == "crop" else 5
        for first, later in ((counted, counted), (ids, ids), (ids, None), (counted, ids)):
            cache = model(tokens[:, :5], position_ids=first[:, :5])[CACHE]
            getattr(cache, change)(value)
            named: dict[str, Any] = {CACHE: copy.deepcopy(cache)}
            if later is not None:
                named["position_ids"] = later.expand(2, -1)[rows, begin:]
            if first is later is counted:
                logits = model(tokens[rows, begin:], **named).logits
                assert distance(logits, full[rows, begin:]) < 2e-5
            else:
                with pytest.raises(UserError, match="do not count on from the tokens in a"):
                    model(tokens[rows, begin:], **named)


class OwnAttention(nn.Module):
    """By such a name, transformers takes this file's classes for those with their own attention."""


def test_a_class_that_takes_no_other_attention_is_refused_before_it_is_changed() -> None:
    model = MODELS["llama"].build().base_model
    unread = {"_can_set_attn_implementation_cached_value": None}  # which LlamaModel may have by now
    model.__class__ = type("OwnStack", (type(model),), {"__module__": __name__, **unread})
    before = model(TOKENS)[0]
    with pytest.raises(UserError, match="OwnStack computes attention by code of its own"):
        set_positions(model, "alibi")
    assert distance(set_positions(model, "own")(TOKENS)[0], before) < 1e-5


class BypassingAttention(LlamaAttention):
    def forward(self, hidden_states: torch.Tensor, **named: Any) -> tuple[torch.Tensor, None]:
        return self.o_proj(self.q_proj(hidden_states)), None


def test_attention_that_does_not_call_ours_is_refused() -> None:
    model = MODELS["llama"].build()
    model.model.layers[1].self_attn.__class__ = BypassingAttention
    set_positions(model, "alibi")
    with pytest.raises(UserError, match="BypassingAttention computes attention by code of its"):
        model(TOKENS)


@pytest.mark.parametrize("spec", ["own", "alibi", "none"])
@pytest.mark.parametrize("padding", [0, 1])
def test_a_decoder_whose_class_counts_from_its_padding_generates(spec: str, padding: int) -> None:
    tiny = MODELS["roberta"]._replace(model="RobertaForCausalLM")
    model = set_positions(tiny.build(is_decoder=True, pad_token_id=padding), spec)
    assert Cell(tiny, model, make_inputs(tiny)).compare_generated(do_sample=False)


@torch.no_grad()
@pytest.mark.parametrize(("name", "short"), [("roberta", "attention_mask"), ("llama", "seq_idx")])
def test_a_mask_and_numbers_of_documents_are_of_all_tokens(name: str, short: str) -> None:
    model = set_positions(MODELS[name].build(), "alibi+documents")
    named = {"position_ids": torch.arange(2, 14)[None], short: torch.ones(1, 4).long()}
    with pytest.raises(UserError, match=rf"{short} \(1, 4\) must be \(1, 12\)"):
        model(TOKENS, **named)


@torch.no_grad()
def test_ends_of_sentences_are_not_kept_in_a_cache() -> None:
    model = set_positions(MODELS["llama"].build(), "sentence_learned", boundary_id=5)
    settings: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    with pytest.raises(UserError, match=r"boundary_id .*use_cache=False"):
        model.generate(TOKENS, **settings)
    texts = model.generate(TOKENS, **settings, use_cache=False)
    assert torch.equal(model(texts[:, :-1]).logits[:, -1].argmax(-1), texts[:, -1])


@torch.no_grad()
def test_a_step_of_decoding_projects_only_new_rows() -> None:
    model = Cell.build("llama", "deberta_v2").model
    projected: list[int] = []
    projection = model.model.layers[0].self_attn.k_proj
    projection.register_forward_hook(lambda _, args, out: projected.append(out.shape[-2]))
    cache = model(TOKENS)[CACHE]
    model(TOKENS[:, :1], **{CACHE: cache})
    projected.clear()
    model(TOKENS[:, :1], **{CACHE: cache})
    assert projected == [1, 1]  # the token, and the row of a distance that is new
    cache.crop(-14)  # all tokens: the rows may be projected by other weights now
    projection.weight.mul_(2)
    assert distance(model(TOKENS, **{CACHE: cache}).logits, model(TOKENS).logits) < 1e-6


LENGTHS = torch.tensor([0, 5, 12], dtype=torch.int32)
PACKED: dict[str, dict[str, Any]] = {
    "ids": {"position_ids": torch.tensor([[*range(5), *range(7)]])},
    "mask": {"attention_mask": torch.tensor([[1] * 5 + [2] * 7])},
    "lengths": {"cu_seq_lens_q": LENGTHS, "cu_seq_lens_k": LENGTHS},
    "numbers": {"seq_idx": torch.tensor([[0] * 5 + [1] * 7])},
}
PLAIN = [(way, False) for way in PACKED]


@pytest.mark.parametrize(("way", "compiled"), some_of(PLAIN, [*PLAIN, ("mask", True)]))
def test_packed_texts_are_kept_apart_or_refused(way: str, compiled: bool) -> None:
    apart, mixing = (Cell.build("llama", f"learned+alibi{x}").model for x in ("+documents", ""))
    alone = compute_logits(apart, {"input_ids": TOKENS[:, 5:]})
    torch._dynamo.reset()
    run: list[Any] = [apart, mixing]
    if compiled:
        run = [torch.compile(model, backend="eager", fullgraph=True) for model in run]
    assert distance(run[0](TOKENS, **PACKED[way]).logits[:, 5:], alone) < 1e-5
    with pytest.raises((UserError, RuntimeError), match=r"add \+documents to learned\+alibi"):
        run[1](TOKENS, **PACKED[way])
    later = {"position_ids": torch.arange(5, 17)[None]}
    assert distance(run[0](TOKENS, **later).logits, mixing(TOKENS, **later).logits) < 1e-5
