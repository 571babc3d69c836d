"""``inspect`` shows weights of models of transformers, and parts that add up to their scores."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from transformers import AttentionInterface, AutoTokenizer

from fairseq_posenc.folders import checksum
from fairseq_posenc.hf import set_positions
from fairseq_posenc.hf.attention import attend_with_positions
from fairseq_posenc.hf.settings import OUR_ATTENTION
from fairseq_posenc.workbench.hf.capture_attention import capture_attention
from fairseq_posenc.workbench.plots.read_folder import _read_target
from tests.helpers.commands import call, refused
from tests.helpers.hf_models import MODELS, Cell, make_inputs, save_tokenizer
from tests.helpers.products import product_of
from tests.workbench.plots.test_inspect import content_of, numbers_of

TEXT = "the cat sat on the mat"


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_weights_are_those_of_the_stock_model(name):
    """In both stacks of a pair, and between them."""
    tiny = MODELS[name]
    inputs, stock = make_inputs(tiny), tiny.build()
    stock.set_attn_implementation("eager")
    out = stock(**inputs, output_attentions=True)
    model = set_positions(tiny.build(), "own")
    before = model(**inputs).logits
    captured = capture_attention(model, inputs)
    assert torch.equal(model(**inputs).logits, before), "the model attends as before"
    expected = {(captured[0].stack, False): out.get("attentions")}
    if tiny.has_encoder:
        of_encoder = () if tiny.hears else out.encoder_attentions
        expected = {("encoder", False): of_encoder, ("decoder", False): out.decoder_attentions}
        expected[("decoder", True)] = out.cross_attentions
    assert len(captured) == sum(map(len, expected.values()))
    for (stack, cross), weights in expected.items():
        layers = [x for x in captured if (x.stack, x.cross) == (stack, cross)]
        assert [layer.layer for layer in layers] == list(range(len(weights)))
        for attention, of_layer in zip(layers, weights):
            torch.testing.assert_close(attention.weights, of_layer, rtol=1e-4, atol=1e-5)
            assert not (cross and attention.split.position.any())


def test_a_model_that_refuses_our_attention_leaves_that_of_others_alone(monkeypatch):
    model = Cell.build("llama", "alibi").model
    monkeypatch.setattr(model, "set_attn_implementation", None)
    with pytest.raises(TypeError, match="not callable"):
        capture_attention(model, make_inputs(MODELS["llama"]))
    assert AttentionInterface()[OUR_ATTENTION] is attend_with_positions


@pytest.mark.parametrize(
    ("name", "spec"), product_of(["llama", "gpt2", "opt"], ["own", "alibi", "m4m", "t5", "none"])
)
def test_parts_of_a_score_add_up_to_what_the_softmax_takes(name, spec):
    cell = Cell.build(name, spec)
    for attention in capture_attention(cell.model, cell.inputs):
        scores = attention.split.scores
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        torch.testing.assert_close(weights.float(), attention.weights, rtol=1e-4, atol=1e-5)
        if spec == "none":
            assert not attention.split.position.any()
            assert float(attention.split.both.abs().max()) < 1e-9
        elif spec in ("alibi", "t5"):
            assert attention.split.position.any()


def test_the_page_of_a_folder(tmp_path, capsys):
    model = MODELS["llama"].build()
    model.save_pretrained(tmp_path / "stock")
    set_positions(model, "alibi").save_pretrained(tmp_path / "alibi")
    pages = {}
    for name, spec in (("stock", "rope(layout=half)"), ("alibi", "alibi")):
        save_tokenizer(tmp_path / name, TEXT.split())
        (tmp_path / name / "training_args.bin").touch()  # beside the weights that `Trainer` saves
        out = tmp_path / f"{name}.html"
        call(capsys, "inspect", "--checkpoint", tmp_path / name, "--text", TEXT, "--out", out)
        pages[name] = out.read_text(encoding="utf-8")
        (shown,) = content_of(pages[name])[0]["models"]
        assert shown["positions"] == {"decoder": spec}
        assert shown["kinds"][0]["keys"] == TEXT.split()
        assert shown["sha256"] == checksum(tmp_path / name / "model.safetensors")
        weights = numbers_of(pages[name], "decoder", "weight")
        assert abs(np.nansum(weights, -1) - 1).max() < 0.05  # rounded; NaN where hidden
    assert not np.nan_to_num(numbers_of(pages["stock"], "decoder", "position")).any()
    assert np.nan_to_num(numbers_of(pages["alibi"], "decoder", "position")).any()


@pytest.mark.parametrize("target", [None, "on the mat"])
def test_the_page_of_an_encoder_and_a_decoder(target, tmp_path, capsys):
    folder, out = tmp_path / "t5", tmp_path / "t5.html"
    MODELS["t5"].build().save_pretrained(folder)
    save_tokenizer(folder, TEXT.split())
    more = [] if target is None else ["--target", target]
    call(capsys, "inspect", "--checkpoint", folder, "--text", TEXT, "--out", out, *more)
    (shown,) = content_of(out.read_text(encoding="utf-8"))[0]["models"]
    assert shown["positions"] == {"encoder": "t5", "decoder": "t5"}
    kinds = {kind["name"]: kind for kind in shown["kinds"]}
    assert list(kinds) == ["encoder", "decoder", "cross"]
    assert kinds["cross"]["keys"] == TEXT.split() == kinds["encoder"]["queries"]
    if target is not None:
        assert kinds["cross"]["queries"] == ["<s>", *target.split()]
    weights = numbers_of(out.read_text(encoding="utf-8"), "cross", "weight")
    assert abs(weights.sum(-1) - 1).max() < 0.05  # rounded


def test_mistakes_are_one_line(tmp_path, capsys):
    words = ["inspect", "--text", TEXT, "--out", tmp_path / "attention.html", "--checkpoint"]
    refuse = partial(refused, capsys, *words)
    (tmp_path / "empty").mkdir()
    assert "empty" in refuse(tmp_path / "empty")
    MODELS["llama"].build().save_pretrained(tmp_path / "llama")
    assert "has no tokenizer" in refuse(tmp_path / "llama")
    assert "no --data" in refuse(tmp_path / "llama", "--data", "bin")
    save_tokenizer(tmp_path / "llama", TEXT.split())
    assert "--target is for models with an encoder" in refuse(tmp_path / "llama", "--target", "mat")
    MODELS["t5"].build(num_decoder_layers=3).save_pretrained(tmp_path / "t5")
    save_tokenizer(tmp_path / "t5", [*TEXT.split(), *map("x{}".format, range(99))])
    assert "12 heads reads 1024 tokens" in refuse(tmp_path / "t5", "--target", "mat " * 1100)
    assert "tokenizer has the id 105, its" in refuse(tmp_path / "t5", "--target", "x98")
    MODELS["gpt2"].build(max_position_embeddings=4).save_pretrained(tmp_path / "short")
    save_tokenizer(tmp_path / "short", TEXT.split())
    assert "reads 4 tokens, and the text has 6" in refuse(tmp_path / "short")


def test_a_models_own_output_ends_late(tmp_path):
    """The defaults of transformers end it after 20 tokens."""
    model = MODELS["t5"].build().eval()
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    save_tokenizer(tmp_path, TEXT.split())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    inputs = dict(tokenizer(TEXT, return_tensors="pt", return_token_type_ids=False))
    assert _read_target(tmp_path, model, tokenizer, inputs, None).shape == (1, 200)
