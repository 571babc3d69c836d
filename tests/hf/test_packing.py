"""Packed batches: each document of a row gives what it gives alone."""

from __future__ import annotations

import pytest
import torch
from transformers import DataCollatorWithFlattening

from fairseq_posenc.errors import UserError
from fairseq_posenc.hf import set_positions
from tests.helpers.hf_models import CACHE, MODELS, SYMBOLS, Cell, compute_logits, distance

LENGTHS = [1, 5, 1, 6, 3]
PACKED = ["llama", "gpt2", "opt", "gemma3", "bert", "modernbert"]
NUMBERS = torch.repeat_interleave(torch.arange(1, 6), torch.tensor(LENGTHS))[None]


def draw_documents():
    torch.manual_seed(2)
    return [torch.randint(3, SYMBOLS, (length,)) for length in LENGTHS]


def pack(documents, **settings):
    rows = [{"input_ids": ids.tolist()} for ids in documents]
    return DataCollatorWithFlattening(**settings)(rows)


@pytest.mark.parametrize(
    "spec", ["rope(layout=half)", "alibi", "learned+t5", "m4m+sink", "rope+window(size=4)"]
)
@pytest.mark.parametrize("name", PACKED)
def test_each_document_gives_what_it_gives_alone(name, spec):
    packed = Cell.build(name, f"{spec}+documents").model
    documents = draw_documents()
    inputs = {k: x for k, x in pack(documents).items() if k != "labels"}
    logits = compute_logits(packed, inputs)[0].split(LENGTHS)
    for ids, of_document in zip(documents, logits):
        assert distance(of_document, compute_logits(packed, {"input_ids": ids[None]})[0]) < 2e-5
    named = {"input_ids": inputs["input_ids"], "attention_mask": NUMBERS}
    assert distance(compute_logits(packed, named), torch.cat(logits)[None]) < 1e-6


@pytest.mark.parametrize("spec", ["alibi", "learned+t5"])
def test_losses_and_gradients_are_those_of_separate_rows(spec):
    documents = draw_documents()
    results = []
    for packs in (True, False):
        model = Cell.build("llama", f"{spec}+documents").model
        total = torch.zeros(())
        for rows in [documents] if packs else [[ids] for ids in documents]:
            total = total + model(**pack(rows), num_items_in_batch=12).loss
        total.backward()
        results.append((total.detach(), [p.grad for p in model.parameters() if p.grad is not None]))
    (loss, gradients), (expected, of_rows) = results
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradients, of_rows, rtol=1e-3, atol=1e-5)


def test_generation_goes_on_with_a_single_document():
    cell = Cell.build("llama", "alibi+documents")
    assert cell.compare_generated(do_sample=False)
    assert cell.compare_padding() < 2e-5


@torch.no_grad()
@pytest.mark.parametrize("spec", ["alibi+documents", "learned+documents", "rope+documents"])
def test_a_cache_that_has_or_gets_documents_is_refused(spec):
    model = Cell.build("llama", spec).model
    tokens, new = torch.arange(3, 9)[None], torch.tensor([[7, 8]])
    packed = torch.tensor([[0, 1, 2, 3, 0, 1]])
    mask = {"attention_mask": torch.tensor([[1, 1, 1, 1, 2, 2]])}
    for first, later in (
        (mask, {"attention_mask": torch.tensor([[1, 1, 1, 1, 2, 2, 2, 2]])}),
        (mask, {"attention_mask": torch.ones(1, 8)}),
        (mask, {}),
        ({"position_ids": packed}, {}),
        ({"seq_idx": torch.tensor([[0, 0, 0, 0, 1, 1]])}, {}),
        ({}, {"attention_mask": torch.tensor([[1, 1, 1, 1, 1, 1, 2, 2]])}),
        ({}, {"position_ids": torch.tensor([[0, 1]])}),
        ({}, {"seq_idx": torch.tensor([[0, 1]])}),
    ):
        cache = model(tokens, **first)[CACHE]
        with pytest.raises(UserError, match="do not count on from the tokens in a cache"):
            model(new, **later, **{CACHE: cache})


@pytest.mark.parametrize("name", PACKED)
def test_a_model_with_its_own_attention_refuses(name):
    model = set_positions(MODELS[name].build(), "own")
    batch = pack(draw_documents(), return_flash_attn_kwargs=True, return_seq_idx=True)
    ways = [["seq_idx"], ["cu_seq_lens_q", "cu_seq_lens_k"], ["position_ids"]]
    for named in [{"attention_mask": NUMBERS}, *({k: batch[k] for k in keys} for keys in ways)]:
        with pytest.raises(UserError, match=r"add \+documents to"):
            model(input_ids=batch["input_ids"], **named)


def test_flash_attention_keeps_texts_apart_by_ids_alone():
    model = set_positions(MODELS["llama"].build(), "own")
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(UserError, match=r"add \+documents to"):
        model(torch.cat(draw_documents())[None], attention_mask=NUMBERS)


@pytest.mark.parametrize("spec", ["own", "alibi", "alibi+documents"])
def test_lengths_of_documents_that_are_whole_rows_change_nothing(spec):
    model = Cell.build("llama", spec).model
    inputs = {"input_ids": torch.randint(3, SYMBOLS, (2, 8))}
    ends = torch.tensor([0, 8, 16], dtype=torch.int32)
    given = {**inputs, "cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
    assert distance(compute_logits(model, given), compute_logits(model, inputs)) < 1e-6
    with pytest.raises(UserError, match="must count padding"):
        model(**inputs, cu_seq_lens_q=ends // 2)


def test_documents_begin_at_other_places_in_other_rows():
    model = Cell.build("llama", "alibi+documents").model
    ids = torch.randint(3, SYMBOLS, (2, 8))
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2], [0, 1, 0, 1, 2, 3, 4, 5]])
    logits = compute_logits(model, {"input_ids": ids, "position_ids": positions})
    for row, start, end in [(0, 0, 5), (0, 5, 8), (1, 0, 2), (1, 2, 8)]:
        alone = compute_logits(model, {"input_ids": ids[row : row + 1, start:end]})[0]
        assert distance(logits[row, start:end], alone) < 2e-5


def test_own_keeps_directions_and_the_boundary():
    model = MODELS["bert"].build()
    set_positions(model, "own+documents", directions="lr,rl", boundary_id=5)
    inputs = {"input_ids": torch.tensor([[7, 8, 5, 9, 10, 11]])}
    before = compute_logits(model, inputs)
    set_positions(model, "own")
    assert torch.equal(compute_logits(model, inputs), before)
    assert model.config.attention_directions == "lr,rl"
    set_positions(model, "own", directions="both", boundary_id=9)
    assert not hasattr(model.config, "attention_directions")
    assert distance(compute_logits(model, inputs), before) > 1e-3
