"""Exported models are trained on in transformers, and come back."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from fairseq import checkpoint_utils

from fairseq_posenc.workbench.loading.pretrained import load_state
from tests.helpers.commands import new_directory
from tests.helpers.exchanged import checkpoint
from tests.helpers.products import product_of, some_of
from tests.workbench.convert import exchange_trainer
from tests.workbench.convert.test_exchange import (
    OTHERS,
    export,
    exported_copy,
    outside,
    padded,
    scores,
)
from tests.workbench.convert.test_exchange_import import import_
from tests.workbench.finetuning.test_glue_commands import data as glue_data
from tests.workbench.finetuning.test_squad_commands import files as squad_files

CLASSES = "AutoModelForSequenceClassification"
SPANS = "AutoModelForQuestionAnswering"
MASKED = "AutoModelForMaskedLM"
PYTHONS = ["here", *(pytest.param(python, marks=pytest.mark.slow) for python in OTHERS)]


def trained_there(python, folder, asked):
    """Train in transformers, here or in another Python, with its folder."""
    asked = {**asked, "out": str(new_directory() / "trained")}
    if python == "here":
        return exchange_trainer.answer(str(folder), asked), asked["out"]
    asked["trainer"] = True
    (found,) = outside(python, (folder, asked), script="exchange_trainer.py")
    return found, asked["out"]


def batch(auto):
    tokens, real = padded("right", rows=4, longest=12, symbols=20)  # as every dictionary has
    given = {"input_ids": tokens, "attention_mask": real.long()}
    if auto == CLASSES:
        return {**given, "labels": torch.tensor([0, 1, 2, 1])}
    if auto == SPANS:
        ends = real.sum(1) - 1
        return {**given, "start_positions": torch.zeros_like(ends), "end_positions": ends}
    return {**given, "labels": tokens.masked_fill(~real, -100)}


def fine_tuned(kind):
    """Return a folder of a model that was fine-tuned in fairseq."""
    more = {"max_positions": 48, "untie_weights_roberta": True}
    if kind == "glue":
        data, pieces = glue_data() / "glue" / "CoLA", glue_data() / "pieces.model"
        return export(
            checkpoint("masked_lm", "m4m", data, "glue", max_update=2, **more), tokens=str(pieces)
        )
    data = squad_files().data
    return export(checkpoint("masked_lm", "m4m", data, "squad", **more), tokens=str(data))


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize(
    ("kind", "auto"),
    [
        ("pretrained", CLASSES),
        ("pretrained", SPANS),
        pytest.param("glue", MASKED, marks=pytest.mark.slow),
        pytest.param("glue", SPANS, marks=pytest.mark.slow),
        pytest.param("squad", MASKED, marks=pytest.mark.slow),
        pytest.param("squad", CLASSES, marks=pytest.mark.slow),
    ],
)
def test_a_fresh_head_is_drawn_whatever_memory_holds(kind, auto, python):
    folder = (
        export(checkpoint("masked_lm", "rope+m4m")) if kind == "pretrained" else fine_tuned(kind)
    )
    options = {"num_labels": 3} if auto == CLASSES else {}
    found, _ = trained_there(
        python, folder, {"auto": auto, "options": options, "batch": batch(auto)}
    )
    assert found["fresh"]
    for name, weight in found["fresh"].items():
        assert weight.isfinite().all(), name
        assert weight.abs().max() < 2, name
        if weight.dim() > 1:
            assert 0.01 < weight.std() < 0.5, name
    assert 0.3 < found["loss"] < 10
    assert found["scores"].isfinite().any()


HARD = [
    ("masked_lm", "rope(scaling=yarn:4)+t5", {"attention_directions": "lr,rl"}),
    ("masked_lm", "learned+m4m(reset=true)", {"encoder_normalize_before": True}),
    ("causal_lm", "xpos+alibi", {}),
    ("causal_lm", "learned", {}),
    ("causal_lm", "rope(layout=half)", {}),
    ("translation", "t5+rope(cross_attention=true)", {}),
    ("translation", "alibi", {"share_all_embeddings": True}),
]
# One of each family, with our code and with that of transformers.
FEW = [HARD[0], HARD[4], HARD[5]]
AUTO = {"causal_lm": "AutoModelForCausalLM", "translation": "AutoModelForSeq2SeqLM"}


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize(("family", "spec", "more"), some_of([*FEW, HARD[1]], HARD))
def test_a_model_that_was_trained_on_comes_back(family, spec, more, python, capsys):
    trained = checkpoint(family, spec, **more)
    auto = AUTO.get(family, MASKED)
    asked = {"auto": auto, "batch": batch(auto)}
    found, folder = trained_there(python, export(trained), asked)
    start = import_(folder)
    # Two tensors of transformers' models, which a training draws apart.
    untied = "share_all" in str(more) or spec in ("learned", "rope(layout=half)")
    assert ("changed in transformers" in capsys.readouterr().out) == untied
    before, after = (load_state(path, "it")["model"] for path in (trained.path, start))
    moved = [name for name in before if not torch.equal(before[name], after[name])]
    assert len(moved) > len(before) / 2
    compare(trained, start, asked["batch"], found["scores"], family)


def compare(trained, start, given, theirs, family):
    """Compare a start's scores with those of transformers, on its training's batch."""
    data = {"data": str(trained.data)}
    (model,), _, _ = checkpoint_utils.load_model_ensemble_and_task([str(start)], data)
    tokens, real = given["input_ids"], given["attention_mask"].bool()
    with torch.no_grad():
        if family == "translation":
            ended = given["labels"].masked_fill(given["labels"].eq(-100), 1)
            previous = torch.cat([torch.full((4, 1), 2), ended[:, :-1]], 1)
            ours = model.eval()(tokens, real.sum(1), previous)[0]
        else:
            ours = scores(trained._replace(model=model.eval()), family, tokens)
    torch.testing.assert_close(ours[real], theirs[real], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("spec", ["learned", "m4m"])
def test_a_head_that_was_trained_there_comes_back(spec, python, capsys):
    """One of transformers' own class, and one with code of its own, whose activation is another."""
    trained = checkpoint("masked_lm", spec)
    asked = {"auto": CLASSES, "options": {"num_labels": 3}, "batch": batch(CLASSES)}
    found, folder = trained_there(python, export(trained), asked)
    state = load_state(import_(folder), "it")
    assert "the folder has no head for masked tokens" in capsys.readouterr().out
    assert state["cfg"].model.pooler_activation_fn == ("tanh" if spec == "learned" else "gelu")
    model = copy.deepcopy(trained.model)
    model.args.pooler_activation_fn = state["cfg"].model.pooler_activation_fn
    name = "sentence_classification_head"
    model.register_classification_head(name, num_classes=3)
    model.load_state_dict(state["model"])
    tokens = asked["batch"]["input_ids"]
    with torch.no_grad():
        ours = model.eval()(tokens, features_only=True, classification_head_name=name)[0]
    torch.testing.assert_close(ours, found["scores"], rtol=1e-4, atol=1e-4)


def read(family, folder, **options):
    auto = getattr(transformers, AUTO.get(family, MASKED))
    return auto.from_pretrained(folder, trust_remote_code=True, **options)


@pytest.mark.parametrize(("family", "spec", "more"), some_of(FEW, HARD))
def test_gradient_checkpointing_changes_no_gradient(family, spec, more):
    model = read(family, exported_copy(family, spec, **more))
    gradients = []
    for enable in (lambda: None, model.gradient_checkpointing_enable):
        enable()
        model.zero_grad()
        torch.manual_seed(1)  # for dropout
        model.train()(**batch(AUTO.get(family, MASKED))).loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for one, other in zip(*gradients):
        torch.testing.assert_close(one, other)


def test_checkpointed_layers_refuse_caches():
    model = read("causal_lm", exported_copy("causal_lm", "alibi")).train()
    model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="call eval"):
        model(torch.tensor([[2, 5, 6]]), use_cache=True)


@pytest.mark.parametrize(("family", "spec", "more"), some_of(FEW, HARD))
def test_every_attention_of_transformers_that_is_allowed_computes_the_same(family, spec, more):
    folder = exported_copy(family, spec, **more)
    given = batch(AUTO.get(family, MASKED))
    one, other = (
        read(family, folder, attn_implementation=name).eval()(**given) for name in ("sdpa", "eager")
    )
    torch.testing.assert_close(one.loss, other.loss)


@pytest.mark.parametrize(
    ("family", "spec", "more", "symbols"),
    product_of(
        [
            *some_of(FEW, HARD),
            ("masked_lm", "m4m", {"untie_weights_roberta": True}),
            ("causal_lm", "alibi", {"no_share_decoder_input_output_embed": True}),
        ],
        [40, 60],
    ),
)
def test_resized_embeddings_are_saved_and_read(family, spec, more, symbols):
    folder = exported_copy(family, spec, **more)
    model = read(family, folder).eval()
    tokens, real = padded("right", rows=3, longest=9, symbols=30)
    given = {"input_ids": tokens, "attention_mask": real.long(), "labels": tokens}
    before = model(**given).logits
    model.resize_token_embeddings(symbols)
    after = model(**given).logits
    kept = min(symbols, before.size(-1))
    torch.testing.assert_close(after[..., :kept], before[..., :kept])
    assert after.size(-1) == symbols
    given["input_ids"] = torch.cat([torch.full((3, 1), symbols - 1), tokens[:, 1:]], 1)
    assert not torch.equal(model(**given).logits, after)  # a new symbol is none that is unknown
    out = new_directory() / "resized"
    model.save_pretrained(out)
    torch.testing.assert_close(read(family, out).eval()(**given).logits, model(**given).logits)


def test_embeddings_of_two_vocabularies_are_not_resized():
    model = read("translation", exported_copy("translation", "alibi"))
    model.encoder.embed_tokens = torch.nn.Embedding(7, 32)
    with pytest.raises(ValueError, match="source and target have 7 and 44 symbols"):
        model.resize_token_embeddings(50)
