"""Tiny models of transformers with random weights, and the cells of the table model x encoding.

A cell is a model with an encoding. :func:`check_cell` measures how far each way to compute the same
thing is from the others: padding on either side, a cache, beams, checkpointing, a reloaded model.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Iterator
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from fairseq_posenc.hf import set_positions

# The argument and output that hold a cache; transformers renames them.
CACHE = "cache" if "cache" in signature(LlamaForCausalLM.forward).parameters else "past_key_values"
SYMBOLS, PADDING, POSITIONS = 97, 0, 64
WIDTH, HEADS, LAYERS = 32, 4, 4
_SIZES = {
    **{"vocab_size": SYMBOLS, "max_position_embeddings": POSITIONS},
    **{"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS},
    **{"pad_token_id": PADDING, "bos_token_id": 1, "eos_token_id": 2},
}
_GATED = {**_SIZES, "intermediate_size": 48, "num_key_value_heads": 2}
_GEMMA = {**_GATED, "head_dim": 16, "query_pre_attn_scalar": 10, "sliding_window": 4}
_PLAIN = {**_SIZES, "intermediate_size": 48}
_SLIDING = {"sliding_window": 5, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]}
_BART = {
    **{"vocab_size": SYMBOLS, "max_position_embeddings": POSITIONS, "d_model": WIDTH},
    **{"encoder_layers": LAYERS, "encoder_attention_heads": HEADS, "encoder_ffn_dim": 48},
    **{"decoder_layers": LAYERS, "decoder_attention_heads": HEADS // 2, "decoder_ffn_dim": 48},
    **{"pad_token_id": PADDING, "bos_token_id": 1, "eos_token_id": 2},
    **{"decoder_start_token_id": 2, "dropout": 0.0},
}


class TinyModel(NamedTuple):
    """A kind of tiny model."""

    model: str  # its class in transformers
    config: str  # the class of its configuration
    settings: dict[str, Any]  # of the configuration
    positions: str  # the spec of what it has

    def build(self, seed: int = 1, **settings: Any) -> PreTrainedModel:
        """Build it with weights that are large enough for positions to matter."""
        torch.manual_seed(seed)
        config = getattr(transformers, self.config)(**{**self.settings, **settings})
        model: PreTrainedModel = getattr(transformers, self.model)(config).eval()
        redraw(model)
        return model

    @property
    def generates(self) -> bool:
        return "MaskedLM" not in self.model

    @property
    def hears(self) -> bool:
        return "Whisper" in self.model

    @property
    def has_encoder(self) -> bool:
        return "ConditionalGeneration" in self.model or "MTModel" in self.model


MODELS: dict[str, TinyModel] = {
    "llama": TinyModel("LlamaForCausalLM", "LlamaConfig", _GATED, "rope(layout=half)"),
    "gemma2": TinyModel(
        "Gemma2ForCausalLM",
        "Gemma2Config",
        # sdpa leaves the cap out.
        {**_GEMMA, "attn_logit_softcapping": 1.5, "attn_implementation": "eager"},
        "rope(layout=half)+window(size=4)+softcap(cap=1.5),rope(layout=half)+softcap(cap=1.5)",
    ),
    "gemma3": TinyModel(
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {**_GEMMA, "layer_types": ["sliding_attention", "full_attention"] * 2},
        "rope(layout=half)+window(size=4),rope(layout=half,base=1000000)",
    ),
    "gpt2": TinyModel("GPT2LMHeadModel", "GPT2Config", _SIZES, "learned"),
    "opt": TinyModel(
        "OPTForCausalLM",
        "OPTConfig",
        {**_SIZES, "ffn_dim": 48, "word_embed_proj_dim": WIDTH, "dropout": 0.0},
        "learned",
    ),
    "bert": TinyModel("BertForMaskedLM", "BertConfig", _PLAIN, "learned"),
    "t5": TinyModel(
        "T5ForConditionalGeneration",
        "T5Config",
        {
            **{"vocab_size": SYMBOLS, "d_model": WIDTH, "d_kv": 8, "d_ff": 48},
            **{"dropout_rate": 0.0, "num_layers": LAYERS, "num_heads": HEADS},
            **{"pad_token_id": PADDING, "eos_token_id": 2, "decoder_start_token_id": PADDING},
        },
        "t5",
    ),
    "bart": TinyModel("BartForConditionalGeneration", "BartConfig", _BART, "learned"),
    "cohere2": TinyModel(
        "Cohere2ForCausalLM", "Cohere2Config", {**_GATED, **_SLIDING}, "3*rope+window(size=5),none"
    ),
    "electra": TinyModel(
        "ElectraForMaskedLM", "ElectraConfig", {**_PLAIN, "embedding_size": WIDTH}, "learned"
    ),
    "gpt_neox": TinyModel(
        "GPTNeoXForCausalLM",
        "GPTNeoXConfig",
        {**_PLAIN, "rotary_pct": 0.5},
        "rope(layout=half,fraction=0.5)",
    ),
    "gpt_oss": TinyModel(
        "GptOssForCausalLM",
        "GptOssConfig",
        {
            **_GATED,
            "head_dim": 16,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "rope_scaling": {"rope_type": "default", "rope_theta": 10000.0},
        },
        "rope(layout=half)+window(size=5)+sink,rope(layout=half)+sink",
    ),
    "m2m_100": TinyModel(
        "M2M100ForConditionalGeneration",
        "M2M100Config",
        # Positions follow the padding; dropped layers or weights would change gradients.
        {
            **_BART,
            "pad_token_id": 1,
            **dict.fromkeys(("encoder_layerdrop", "decoder_layerdrop", "attention_dropout"), 0.0),
        },
        "sinusoidal(layout=fairseq)",
    ),
    "marian": TinyModel(
        "MarianMTModel",
        "MarianConfig",
        {**_BART, "scale_embedding": True, "decoder_attention_heads": HEADS},
        "sinusoidal(layout=half)",
    ),
    "mistral": TinyModel(
        "MistralForCausalLM",
        "MistralConfig",
        {**_GATED, "sliding_window": 5},
        "rope(layout=half)+window(size=5)",
    ),
    "modernbert": TinyModel(
        "ModernBertForMaskedLM",
        "ModernBertConfig",
        {
            **_PLAIN,
            "local_attention": 4,
            "global_attn_every_n_layers": 2,
            "cls_token_id": 1,
            "sep_token_id": 2,
        },
        "rope(base=160000,layout=half),rope(layout=half)+window(size=4)",
    ),
    "olmo2": TinyModel("Olmo2ForCausalLM", "Olmo2Config", _GATED, "rope(layout=half)"),
    "olmo3": TinyModel(
        "Olmo3ForCausalLM",
        "Olmo3Config",
        {**_GATED, **_SLIDING, "rope_theta": 10000.0},
        "3*rope(base=500000,layout=half)+window(size=5),rope(layout=half)",
    ),
    "phi3": TinyModel("Phi3ForCausalLM", "Phi3Config", _GATED, "rope(layout=half)"),
    "qwen2": TinyModel("Qwen2ForCausalLM", "Qwen2Config", _GATED, "rope(layout=half)"),
    "qwen3": TinyModel(
        "Qwen3ForCausalLM", "Qwen3Config", {**_GATED, "head_dim": 16}, "rope(layout=half)"
    ),
    "roberta": TinyModel(
        "RobertaForMaskedLM", "RobertaConfig", {**_PLAIN, "type_vocab_size": 1}, "learned"
    ),
    "smollm3": TinyModel(
        "SmolLM3ForCausalLM", "SmolLM3Config", _GATED, "3*rope(base=2000000,layout=half),none"
    ),
    "whisper": TinyModel(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {
            **_BART,
            "num_mel_bins": 8,
            "max_source_positions": 10,
            "max_target_positions": POSITIONS,
            "begin_suppress_tokens": None,
            "suppress_tokens": None,
        },
        "learned",
    ),
    "xlm_roberta": TinyModel(
        "XLMRobertaForMaskedLM", "XLMRobertaConfig", {**_PLAIN, "type_vocab_size": 1}, "learned"
    ),
}


def save_tokenizer(folder: Path, words: Iterable[str]) -> None:
    """Save a tokenizer that cuts at white space, and knows some words."""
    vocabulary = {word: index for index, word in enumerate(["<s>", "<unk>", *sorted({*words})])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", unk_token="<unk>")
    fast.save_pretrained(folder)


def edit_config(folder: Path, name: str = "config.json", **settings: Any) -> None:
    """Change settings of a folder's model, or of its tokenizer."""
    content = json.loads((folder / name).read_text(encoding="utf-8"))
    (folder / name).write_text(json.dumps(content | settings), encoding="utf-8")


def edit_weights(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    """Change the weights of a folder."""
    path = folder / "model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, path, metadata={"format": "pt"})


def save_llama(folder: Path, words: Iterable[str]) -> None:
    """Save a tiny causal language model in which attention differs by position, and a tokenizer."""
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=24, num_hidden_layers=2, max_position_embeddings=16, **sizes)
    model = LlamaForCausalLM(config)
    redraw(model, std=0.3)
    model.save_pretrained(folder)
    save_tokenizer(folder, words)


def redraw(module: nn.Module, std: float = 0.2) -> None:
    """Draw all matrices of a module again, so that each of them changes what it computes."""
    for parameter in module.parameters():
        if parameter.dim() > 1 and parameter.requires_grad:
            nn.init.normal_(parameter, std=std)


def redraw_positions(model: nn.Module) -> None:
    """Draw all trained parameters of positions again, vectors included."""
    for parameter in position_parameters(model).values():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.3)


def position_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Select the parameters of our encodings."""
    return {name: x for name, x in model.named_parameters() if ".positions." in f".{name}"}


def make_inputs(tiny: TinyModel, batch: int = 2, length: int = 12) -> dict[str, Tensor]:
    """Draw the inputs of a model, without padding."""
    torch.manual_seed(7)
    inputs = {"input_ids": torch.randint(3, SYMBOLS, (batch, length))}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    if tiny.hears:
        inputs = {"input_features": torch.randn(batch, 8, 20)}
    if tiny.has_encoder:
        inputs["decoder_input_ids"] = torch.randint(3, SYMBOLS, (batch, length - 2))
    return inputs


def pad(inputs: dict[str, Tensor], left: int, right: int) -> dict[str, Tensor]:
    """Pad all tokens on both sides, the decoder's with a mask of their own."""
    padded = {}
    for name, x in inputs.items():
        if x.dim() > 2:  # of an encoder of speech, which knows no padding
            padded[name] = x
            continue
        ends = [x.new_full((x.size(0), n), 0 if "mask" in name else PADDING) for n in (left, right)]
        padded[name] = torch.cat([ends[0], x, ends[1]], 1)
    if (ids := inputs.get("decoder_input_ids")) is not None:
        padded["decoder_attention_mask"] = pad({"mask": torch.ones_like(ids)}, left, right)["mask"]
    return padded


@torch.no_grad()
def compute_logits(model: PreTrainedModel, inputs: dict[str, Tensor], **settings: Any) -> Tensor:
    """Run a model without gradients; one without a head gives states."""
    return model(**inputs, **settings)[0]


@torch.no_grad()
def compute_in_steps(model: PreTrainedModel, steps: Iterable[dict[str, Any]]) -> Tensor:
    """Run a model on one part of the tokens after the other, with a cache; join its logits."""
    cache, parts = None, []
    for step in steps:
        out = model(**step, **{CACHE: cache}, use_cache=True)
        cache = out[CACHE]
        parts.append(out[0])
    return torch.cat(parts, 1)


def distance(a: Tensor, b: Tensor) -> float:
    """Measure the largest difference, as a part of the largest number."""
    return float((a - b).abs().max() / b.abs().max())


class Cell(NamedTuple):
    """A tiny model with an encoding."""

    tiny: TinyModel
    model: PreTrainedModel
    inputs: dict[str, Tensor]

    @classmethod
    def build(cls, name: str, spec: str, **settings: Any) -> Cell:
        """Build a model by its name, and give it positions with weights that matter."""
        tiny = MODELS[name]
        model = set_positions(tiny.build(**settings), spec)
        torch.manual_seed(3)
        redraw_positions(model)
        return cls(tiny, model, make_inputs(tiny))

    def compare_padding(self) -> float:
        """Compare logits with those of the same tokens with padding on both sides."""
        left, right = 3, 2
        logits = compute_logits(self.model, pad(self.inputs, left, right))[:, left:-right]
        return distance(logits, compute_logits(self.model, self.inputs))

    def compare_cache(self) -> float:
        """Compare logits with those of a generation: several tokens, then one by one."""
        inputs = pad(self.inputs, 2, 0)  # in a decoder, the shorter sentences of a batch
        whole = compute_logits(self.model, inputs)
        name = "decoder_input_ids" if self.tiny.has_encoder else "input_ids"
        mask_name = name.replace("input_ids", "attention_mask")
        ids, mask = inputs[name], inputs[mask_name]
        spans = [(0, 5), (5, 9), *((i, i + 1) for i in range(9, ids.size(1)))]
        steps = [{**inputs, name: ids[:, a:b], mask_name: mask[:, :b]} for a, b in spans]
        return distance(compute_in_steps(self.model, steps)[:, 2:], whole[:, 2:])

    def compare_reloaded(self) -> float:
        """Compare logits with those of a new model that loads this one's state."""
        other = self.tiny.build(seed=5)
        set_positions(other, self.model.config.position_encoding)
        other.load_state_dict(copy.deepcopy(self.model.state_dict()))
        return distance(*(compute_logits(x, self.inputs) for x in (other, self.model)))

    def compare_generated(self, **settings: Any) -> bool:
        """Compare generated tokens with those of a generation without a cache, left-padded."""
        named = {k: v for k, v in self.inputs.items() if "decoder" not in k}
        lines = []
        for inputs, use_cache in ((named, True), (pad(named, 3, 0), True), (named, False)):
            torch.manual_seed(11)
            tokens = self.model.generate(
                **inputs, max_new_tokens=3, use_cache=use_cache, pad_token_id=PADDING, **settings
            )
            start = 0 if self.tiny.has_encoder else inputs["input_ids"].size(1)
            lines.append(tokens[:, start:])
        return all(torch.equal(line, lines[0]) for line in lines)

    def gradients(self, checkpointing: bool | None = None, later: int = 0) -> dict[str, Tensor]:
        """Compute the gradients of a loss, if need be after another pass of ``later`` tokens."""
        model = self.model.train()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        if checkpointing is not None:
            model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
            model.enable_input_require_grads()  # which reentrant checkpointing needs
        model.zero_grad()
        labels = self.inputs.get("decoder_input_ids", self.inputs.get("input_ids"))
        loss = model(**self.inputs, labels=labels).loss
        if later:
            model(torch.ones(1, later).long())
        loss.backward()
        model.gradient_checkpointing_disable()
        model.eval()
        return {
            name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
            for name, p in model.named_parameters()
        }


def checks_of(cell: Cell) -> Iterator[tuple[str, Callable[[], float | bool]]]:
    """Yield the checks that a cell has, by name; each returns a difference, or whether it holds."""
    yield "padding", cell.compare_padding
    yield "reloaded", cell.compare_reloaded
    if cell.tiny.generates:
        yield "cache", cell.compare_cache
        yield "beams", lambda: cell.compare_generated(num_beams=3, do_sample=False)
