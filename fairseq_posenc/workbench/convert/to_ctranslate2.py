"""Exports a trained model for CTranslate2, an engine that runs Transformers on CPUs and GPUs.

CTranslate2 has fields for vectors at the input, a rotation of queries and keys, vectors by distance
for keys and values, and a bias by distance. Models with other positions are refused.
"""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import ctranslate2
import torch
from ctranslate2.converters import fairseq as converter
from ctranslate2.specs import transformer_spec
from ctranslate2.specs.attention_spec import MultiHeadAttentionSpec, RotaryScalingType
from ctranslate2.specs.common_spec import Activation
from ctranslate2.specs.model_spec import OPTIONAL
from torch import Tensor, nn
from torch.nn import functional as F

from fairseq_posenc.encodings.base import Dims
from fairseq_posenc.encodings.rope import Rope
from fairseq_posenc.encodings.terms import Terms
from fairseq_posenc.errors import UserError
from fairseq_posenc.folders import whole_folder
from fairseq_posenc.position_parameters import is_position_parameter
from fairseq_posenc.positions import Span
from fairseq_posenc.workbench.convert.card import Labels, format_serving_usage, write_card
from fairseq_posenc.workbench.convert.comparison import (
    SPECIAL_SYMBOLS,
    compute_scores,
    draw_batch,
    refuse_difference,
)
from fairseq_posenc.workbench.convert.tokenizer import write_serving_tokenizers
from fairseq_posenc.workbench.loading.open_model import OpenModel

_AT_INPUT = ("learned", "sinusoidal")
_BIASES = ("sandwich", "t5")  # CTranslate2 counts their distances wrongly in prompts of causal LMs
_ENCODINGS = (*_AT_INPUT, *_BIASES, "alibi", "lerope", "none", "rope", "shaw", "shaw_values")
_ACTIVATIONS = {
    "relu": Activation.RELU,
    "gelu": Activation.GELU,
    "gelu_fast": Activation.GELUTanh,
    "gelu_accurate": Activation.GELUTanh,
    "tanh": Activation.Tanh,
}
_READ_WEIGHTS = re.compile(  # the names of the weights that CTranslate2 reads
    r".*\.(embed_tokens|layernorm_embedding|[qkv]_proj|out_proj|(\w+_)?layer_norm|fc[12]|"
    r"output_projection)\.(weight|bias)"
)


def export_to_ctranslate2(
    trained: OpenModel, quantization: str, tokens: str | None, out: Path, labels: Labels
) -> list[str]:
    """Write a folder that CTranslate2 reads, compare the two models, and return lines for the user.

    Args:
        trained: the model.
        quantization: ``float32``, ``float16`` or ``int8``.
        tokens: value of ``--tokens``; None to find a tokenizer in the folder of the data.
        out: the folder.
        labels: labels of the model card.

    Raises:
        UserError: CTranslate2 cannot compute the model, or its scores differ.
    """
    if trained.head not in ("translation", "causal_lm"):
        raise _refusal(f"a {trained.family.title}: it serves translation models and causal LMs")
    with whole_folder(out) as folder:
        files, vocabularies = write_serving_tokenizers(trained, tokens, folder)
        largest, _ = _write_and_compare(trained, vocabularies, "float32", folder)
        refuse_difference("--to ctranslate2: log probabilities differ from the model's", largest)
        notes = [f"log probabilities in float32 equal to {largest:.1e} of the largest one"]
        if quantization != "float32":
            _, mean = _write_and_compare(trained, vocabularies, quantization, folder)
            notes.append(
                f"log probabilities in {quantization} are {mean:.1e} from those of float32 in the "
                "mean, of random text"
            )
        usage = format_serving_usage(trained, files)
        write_card(folder, trained, "ctranslate2", usage, notes, labels)
    return [f"wrote {out}: a model of CTranslate2 in {quantization}", *notes]


def _refusal(lacking: str) -> UserError:
    return UserError(f"--to ctranslate2: CTranslate2 does not support {lacking}")


@torch.no_grad()
def _write_and_compare(
    trained: OpenModel, vocabularies: list[list[str]], quantization: str, folder: Path
) -> tuple[float, float]:
    """Write or replace a model, and compare log probabilities of random sentences.

    Return the largest difference, as a share of the largest log probability, and the mean one.
    """
    specification = build_specification(trained, vocabularies)
    specification.optimize(quantization)
    specification.save(str(folder))
    ours, lines = [], []
    for row in zip(*draw_batch(trained.model, "right")):
        *sources, target = sentences = [ids[ids.ge(SPECIAL_SYMBOLS)] for ids in row]
        end = torch.tensor([trained.model.decoder.eos_idx])
        inputs = [torch.cat([ids, end]) for ids in sources]
        inputs.append(torch.cat([end, target]))  # fairseq's decoders begin with </s>
        scores = compute_scores(trained.model, trained.head, *(ids[None] for ids in inputs))[0]
        expected = torch.cat([target, end])[:, None]
        ours.append(scores.log_softmax(-1).gather(1, expected)[:, 0])
        lines.append([[x[i] for i in ids] for x, ids in zip(vocabularies, sentences)])
    options = {"inter_threads": 1, "intra_threads": 1}
    if trained.translates:
        translator = ctranslate2.Translator(str(folder), **options)
        results = translator.score_batch(*map(list, zip(*lines)), max_input_length=0)  # never cut
    else:
        generator = ctranslate2.Generator(str(folder), **options)
        texts = [["</s>", *line, "</s>"] for (line,) in lines]
        results = generator.score_batch(texts, max_input_length=0)
    our_log_probs = torch.cat(ours)
    differences = our_log_probs - torch.tensor([x for result in results for x in result.log_probs])
    largest = differences.abs().max() / our_log_probs.abs().max()
    return float(largest), float(differences.abs().mean())


@torch.no_grad()
def build_specification(trained: OpenModel, vocabularies: list[list[str]]) -> Any:
    """Build CTranslate2's specification of a model: a tree of layers, whose leaves are the weights.

    Args:
        trained: the model.
        vocabularies: symbols of each dictionary, the source's first.

    Raises:
        UserError: the model has something that CTranslate2 does not support.
    """
    for name in trained.weights:
        if not (is_position_parameter(name) or _READ_WEIGHTS.fullmatch(name)):
            raise _refusal(name)
    stacks = {name: _build_stack(trained, stack) for name, stack in trained.stacks.items()}
    if trained.translates:
        specification: Any = transformer_spec.TransformerSpec(stacks["encoder"], stacks["decoder"])
        specification.register_source_vocabulary(vocabularies[0])
        specification.register_target_vocabulary(vocabularies[-1])
        # fairseq's decoders begin with </s>, as do its causal LMs without --add-bos-token.
        specification.config.decoder_start_token = specification.config.eos_token
        specification.config.add_source_eos = True
    else:
        specification = transformer_spec.TransformerDecoderModelSpec(stacks["decoder"])
        specification.register_vocabulary(vocabularies[0])
        if not trained.settings.task.add_bos_token:
            specification.config.bos_token = specification.config.eos_token
    specification.validate()
    return specification


def _build_stack(trained: OpenModel, stack: Any) -> Any:
    """Build an encoder or a decoder with its weights and positions."""
    dims: Dims = stack.assembly.dims
    names = {item.name for item in stack.assembly.spec.items}
    _refuse_options(stack, names, trained.translates)
    terms = _compute_terms(stack)
    # CTranslate2 computes ALiBi itself in a causal LM, for all layers; elsewhere it is a bias.
    alibi = "alibi" in names and not trained.translates
    if alibi and any(layer_terms.bias is None for layer_terms in terms):
        raise _refusal(f"{stack.assembly.spec}: alibi in some layers of a causal LM")
    style = {
        "num_heads": dims.num_heads,
        "pre_norm": stack.layers[0].normalize_before,
        "no_final_norm": stack.layer_norm is None,
        "activation": _ACTIVATIONS[stack.cfg.activation_fn],
        "layernorm_embedding": stack.layernorm_embedding is not None,
    }
    copied = copy.deepcopy(stack)  # quantization changes weights in place
    copied.embed_positions = _build_position_table(stack)
    if dims.causal:
        spec: Any = transformer_spec.TransformerDecoderSpec(
            len(stack.layers), with_encoder_attention=trained.translates, **style
        )
        spec.alibi = alibi
    else:
        spec = transformer_spec.TransformerEncoderSpec(len(stack.layers), **style)
    for layer_spec, layer, layer_terms in zip(spec.layer, stack.layers, terms):
        layer_terms = layer_terms._replace(bias=None) if alibi else layer_terms
        layer_spec.self_attention = _build_attention(stack, layer, layer_terms)
    if dims.causal:
        converter.set_transformer_decoder(spec, copied, trained.translates)
    else:
        converter.set_transformer_encoder(spec, copied)
    return spec


def _build_position_table(stack: Any) -> nn.Embedding:
    """Build the table of vectors at the input; without one, CTranslate2 would add sinusoids."""
    dims: Dims = stack.assembly.dims
    table = torch.zeros(dims.max_positions, dims.embed_dim)
    if stack.embed_positions is not None:
        table = stack.embed_positions(torch.full((1, dims.max_positions), SPECIAL_SYMBOLS))[0]
    return nn.Embedding.from_pretrained(F.pad(table, (0, 0, 1, 0)), padding_idx=0)


def _refuse_options(stack: Any, names: set[str], translates: bool) -> None:
    """Refuse options and encodings that CTranslate2 lacks; the comparison finds other options."""
    if stack.cfg.activation_fn not in _ACTIVATIONS:
        raise _refusal(f"the activation {stack.cfg.activation_fn}, but {', '.join(_ACTIVATIONS)}")
    spec = stack.assembly.spec
    known = set(_ENCODINGS) if translates else set(_ENCODINGS).difference(_BIASES)
    if others := sorted(names - known):
        raise _refusal(f"{spec}: {others[0]} is not one of {', '.join(sorted(known))}")
    if names.intersection(_AT_INPUT) and len(names - {"none"}) > 1:
        raise _refusal(f"{spec}: it has positions either at the input or in the attention")
    if getattr(stack, "rotates_source", False):
        raise _refusal("rope(cross_attention=true)")
    if not stack.assembly.dims.causal and set(stack.directions) != {"both"}:
        raise _refusal("attention directions")


def _compute_terms(stack: Any) -> list[Terms]:
    """Compute vectors and biases of each layer for all distances, the smallest first."""
    length = stack.assembly.dims.max_positions
    tokens = torch.full((1, length), SPECIAL_SYMBOLS)
    span = Span.from_lengths(tgt_len=length, src_len=length, device=tokens.device)
    shared = stack.compute_shared(tokens, tgt_len=length)
    attentions = [layer.self_attn for layer in stack.layers]
    return [x.terms(span, shared.of_kind(x.kind)).expanded() for x in attentions]


def _build_attention(stack: Any, layer: Any, terms: Terms) -> MultiHeadAttentionSpec:
    """Build the self-attention of a layer with only its positions set."""
    dims = stack.assembly.dims
    encodings = stack.encodings.select(layer.self_attn.kind).as_list()
    rope = next((encoding for encoding in encodings if isinstance(encoding, Rope)), None)
    tables = [x for x in (terms.query_table, terms.value_table) if x is not None]
    if terms.first is not None or any(table.size(0) > 1 for table in tables):
        raise _refusal(f"{stack.assembly.spec}: vectors for each head, or for the first token")
    rotary: dict[str, Any] = {}
    gain = 1.0  # by which a scaling multiplies rotated queries and keys
    if rope is not None:
        gain = rope.scaling.gain(rope.dims)
        if gain != 1 and (tables or rope.rotated < dims.head_dim):
            raise _refusal(f"{stack.assembly.spec}: a rotation that scales a part of the scores")
        rotary = {
            "rotary_dim": rope.rotated,
            "rotary_interleave": rope.layout == "interleaved",
            "rotary_base": rope.base,
            "rotary_scaling_type": RotaryScalingType.Su,  # has a factor for each pair
        }
    spec = MultiHeadAttentionSpec(
        self_attention=True,
        relative_position=bool(tables),
        relative_attention_bias=terms.bias is not None,
        **rotary,
    )
    if rope is not None:
        unscaled = rope.base ** -(torch.arange(0, rope.rotated, 2) / rope.rotated)
        factors = (unscaled / rope.angles_per_position()).numpy()
        spec.rotary_scaling_long_factor = spec.rotary_scaling_short_factor = factors
    if tables:  # (1, distances, head_dim)
        keys, values = terms.query_table, terms.value_table
        keys = torch.zeros_like(tables[0]) if keys is None else keys  # CTranslate2 needs some
        spec.relative_position_keys = keys[0].numpy()
        spec.relative_position_values = OPTIONAL if values is None else values[0].numpy()
    if terms.bias is not None:
        _set_bias(spec, terms.bias, dims)
    spec.queries_scale = terms.scale(dims.head_dim) * gain**2
    return spec


def _set_bias(spec: MultiHeadAttentionSpec, bias: Tensor, dims: Dims) -> None:
    """Set a bias by distance in the form of T5's, with a bucket for each distance.

    T5 has buckets for earlier keys, by distance, then for later keys. In both, the first half of
    the buckets have a single distance; the second half have ranges of larger distances, which the
    model never sees, so they repeat the last bias.
    """
    length = dims.max_positions
    past, later = bias[:, :length].flip(1), bias[:, length - 1 :]
    sides = [past] if dims.causal else [past, later]
    buckets = torch.cat([F.pad(side, (0, length), mode="replicate") for side in sides], dim=1)
    spec.relative_attention_bias = buckets.expand(dims.num_heads, -1).t().contiguous().numpy()
    # First distance of the last bucket; any large number will do, as these buckets are equal.
    spec.relative_attention_max_distance = torch.tensor(2 * length, dtype=torch.int32).numpy()
