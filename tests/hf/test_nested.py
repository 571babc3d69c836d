"""A model with positions inside another: refused when the other one is saved, never lost."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from transformers import PreTrainedModel

from fairseq_posenc.errors import UserError
from fairseq_posenc.hf import read_positions, set_positions
from tests.helpers.hf_models import distance, redraw, save_tokenizer

SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64}
SIZES |= {"num_hidden_layers": 2, "num_attention_heads": 4}
WORDS: dict[str, Any] = {**SIZES, "vocab_size": 100}
DECODER: dict[str, Any] = {**WORDS, "max_position_embeddings": 64, "add_cross_attention": True}
IMAGES: dict[str, Any] = {**SIZES, "image_size": 16, "patch_size": 8}


def build_llava(text: Any = None) -> tuple[PreTrainedModel, PreTrainedModel]:
    text = text or transformers.LlamaConfig(**WORDS)
    vision = transformers.CLIPVisionConfig(**IMAGES)
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=99)
    model = transformers.LlavaForConditionalGeneration(config)
    return model, model.model.language_model


def build_gemma3() -> tuple[PreTrainedModel, PreTrainedModel]:
    text = transformers.Gemma3TextConfig(**WORDS, head_dim=8, num_key_value_heads=4)
    vision = transformers.SiglipVisionConfig(**IMAGES)
    images = {"image_token_index": 99, "mm_tokens_per_image": 4}
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, **images)
    model = transformers.Gemma3ForConditionalGeneration(config)
    return model, model.model.language_model


def build_encoder_decoder() -> tuple[PreTrainedModel, PreTrainedModel]:
    encoder = transformers.GteModel(transformers.GteConfig(**WORDS))  # its files join weights
    decoder = transformers.BertLMHeadModel(transformers.BertConfig(**DECODER, is_decoder=True))
    model = transformers.EncoderDecoderModel(encoder=encoder, decoder=decoder)
    return model, model.encoder


def build_speech_translator() -> tuple[PreTrainedModel, PreTrainedModel]:
    convolutions = {"conv_dim": (16, 16), "conv_stride": (5, 4), "conv_kernel": (10, 8)}
    positions = {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4}
    speech = transformers.Wav2Vec2Config(**SIZES, **convolutions, **positions)
    encoder = transformers.Wav2Vec2Model(speech)
    decoder = transformers.GPT2LMHeadModel(transformers.GPT2Config(**DECODER))
    model = transformers.SpeechEncoderDecoderModel(encoder=encoder, decoder=decoder)
    return model, model.decoder


def build_captioner() -> tuple[PreTrainedModel, PreTrainedModel]:
    encoder = transformers.ViTModel(transformers.ViTConfig(**IMAGES))
    decoder = transformers.GPT2LMHeadModel(transformers.GPT2Config(**DECODER))
    model = transformers.VisionEncoderDecoderModel(encoder=encoder, decoder=decoder)
    return model, model.decoder


OWNERS: dict[str, Callable[[], tuple[PreTrainedModel, PreTrainedModel]]] = {
    "LLaVA": build_llava,
    "Gemma 3": build_gemma3,
    "encoder-decoder": build_encoder_decoder,
    "vision encoder-decoder": build_captioner,
    "speech encoder-decoder": build_speech_translator,
}


@pytest.mark.parametrize("owner", OWNERS)
def test_an_owners_folder_is_never_read_as_stock(owner: str, tmp_path: Path) -> None:
    whole, part = OWNERS[owner]()
    set_positions(part, "alibi")
    weights = whole.state_dict()
    # As it saves itself, or as a Trainer does with FSDP.
    for way, given in ((whole.base_model, None), (whole, None), (whole, dict(weights))):
        way.save_pretrained(tmp_path / "whole", state_dict=given)
        with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
            type(way).from_pretrained(tmp_path / "whole")
    part.save_pretrained(tmp_path / "part")
    is_base = part.base_model is part
    auto: Any = transformers.AutoModel if is_base else transformers.AutoModelForCausalLM
    assert read_positions(auto.from_pretrained(tmp_path / "part")) == "alibi"
    again, part = OWNERS[owner]()
    with pytest.raises(RuntimeError, match="size mismatch"):
        again.load_state_dict(weights, strict=False)
    set_positions(part, "alibi")
    again.load_state_dict(weights)
    assert all(torch.equal(weights[name], x) for name, x in again.state_dict().items())
    with pytest.raises(UserError, match="weights of a model whose positions were not set"):
        again.load_state_dict(OWNERS[owner]()[0].state_dict(), strict=False)


@pytest.mark.usefixtures("_alone")
def test_an_owner_whose_shards_are_consolidated_is_never_read_as_stock(tmp_path: Path) -> None:
    whole, part = build_llava()
    set_positions(part, "alibi")
    fully_shard(whole)
    with pytest.raises(AttributeError, match="fairseq_posenc_set_positions_first"):
        get_model_state_dict(whole, options=StateDictOptions(full_state_dict=True))
    shards = whole.state_dict()
    weights = {name: getattr(x, "full_tensor", lambda x=x: x)() for name, x in shards.items()}
    whole.save_pretrained(tmp_path / "whole", state_dict=dict(weights))
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        type(whole).from_pretrained(tmp_path / "whole")
    again, part = build_llava()
    set_positions(part, "alibi")
    again.load_state_dict(weights)


@pytest.mark.parametrize("spec", ["rope(layout=half)", "alibi"])
@pytest.mark.parametrize("owner", ["LLaVA", "Gemma 3"])
def test_an_owner_generates_without_other_windows(owner: str, spec: str) -> None:
    mistral = transformers.MistralConfig(**WORDS, num_key_value_heads=4, sliding_window=4)
    whole, part = build_gemma3() if owner == "Gemma 3" else build_llava(mistral)
    redraw(whole.eval())
    set_positions(part, spec)
    ids, settings = torch.arange(3, 13)[None], {"max_new_tokens": 5, "do_sample": False}
    with pytest.raises(UserError, match="text_config be this one's config"):
        whole.generate(ids, **settings)
    whole.config.text_config = part.config
    texts = [whole.generate(ids, **settings, use_cache=use_cache) for use_cache in (True, False)]
    assert torch.equal(*texts)
    if owner == "Gemma 3" and spec == "alibi":  # our attention would not see such a mask
        stock = {"full_attention": None, "sliding_attention": torch.ones(1, 1, 10, 10)}
        with pytest.raises(UserError, match="text_config be this one's config"):
            part(ids, attention_mask=stock)
        set_positions(part, "alibi+documents")  # packed texts wrap the mask of an image's tokens
        for named in ({}, {"position_ids": ids % 5}):
            with pytest.raises(UserError, match="tokens of images see later ones"):
                whole(ids, token_type_ids=torch.ones_like(ids), **named)


@torch.no_grad()
def test_the_decoder_of_speech_takes_positions() -> None:
    whole, decoder = build_speech_translator()
    inputs = {"input_values": torch.randn(2, 800), "decoder_input_ids": torch.arange(14).view(2, 7)}
    before = whole.eval()(**inputs).logits
    set_positions(decoder, "own")
    assert distance(whole(**inputs).logits, before) < 1e-5
    set_positions(decoder, "alibi")
    settings = {"max_new_tokens": 5, "do_sample": False, "decoder_start_token_id": 2}
    generate = partial(whole.generate, inputs["input_values"], **settings, pad_token_id=0)
    assert torch.equal(generate(use_cache=True), generate(use_cache=False))
    with pytest.raises(UserError, match="'speech-encoder-decoder' cannot be given"):
        set_positions(whole, "alibi")


@torch.no_grad()
def test_each_part_has_its_own_attention() -> None:
    whole, part = build_encoder_decoder()  # the encoder's layers keep a configuration of their own
    named = dict.fromkeys(["input_ids", "decoder_input_ids"], torch.arange(3, 13)[None])
    redraw(whole.eval())
    expected = whole(**named).logits
    set_positions(part, "own").set_attn_implementation("fairseq_posenc")
    assert distance(whole(**named).logits, expected) < 1e-5
    set_positions(part, "alibi")
    refused = {"fairseq_posenc": "^BertSelfAttention: ", "sdpa": "^GteModel: its attention 'sdpa'"}
    for attention, words in refused.items():
        whole.set_attn_implementation(attention)
        with pytest.raises(UserError, match=words):
            whole(**named)


def test_parts_that_get_their_positions_before_are_guarded_too(tmp_path: Path) -> None:
    encoder = transformers.BertModel(transformers.BertConfig(**WORDS))
    set_positions(encoder, "learned+alibi")
    weights = copy.deepcopy(encoder.state_dict())
    decoder = transformers.BertLMHeadModel(transformers.BertConfig(**DECODER, is_decoder=True))
    model = transformers.EncoderDecoderModel(encoder=encoder, decoder=decoder)
    assert all(torch.equal(weights[name], x) for name, x in encoder.state_dict().items())
    model.save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        transformers.EncoderDecoderModel.from_pretrained(tmp_path)


def test_the_base_of_a_model_with_a_head_is_not_saved_as_stock(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**WORDS)
    set_positions(transformers.LlamaForCausalLM(config), "t5").model.save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        transformers.LlamaModel.from_pretrained(tmp_path, config=config)
    assert read_positions(transformers.AutoModel.from_pretrained(tmp_path)).startswith("t5")


def test_sentence_transformers_saves_the_positions_of_its_model(tmp_path: Path) -> None:
    sentence = pytest.importorskip("sentence_transformers", reason="needs sentence-transformers")
    models = pytest.importorskip("sentence_transformers.models", reason="needs them, too")
    transformers.BertModel(transformers.BertConfig(**WORDS)).save_pretrained(tmp_path / "stock")
    save_tokenizer(tmp_path / "stock", [f"w{index}" for index in range(90)])
    parts = [models.Transformer(str(tmp_path / "stock")), models.Pooling(32)]
    model = sentence.SentenceTransformer(modules=parts, device="cpu")
    set_positions(model[0].auto_model, "learned+m4m")
    assert "whose positions were set" in model[0].config.name_or_path  # which the library reads
    model.save(str(tmp_path / "saved"))
    again = sentence.SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    assert read_positions(again[0].auto_model) == "learned+m4m"
    state = model.state_dict()
    assert all(torch.equal(state[name], weight) for name, weight in again.state_dict().items())
