"""Exports a trained model for CTranslate2, an engine that runs Transformers on CPUs and GPUs.

CTranslate2 has fields for vectors at the input, a rotation of queries and keys, vectors by distance
for keys and values, and a bias by distance. Models with other encodings are refused. Options that
it lacks, such as vectors for each head, show when the two models are compared.
"""

import copy
from pathlib import Path
from typing import Any

import ctranslate2
import torch
from ctranslate2.converters import fairseq as converter
from ctranslate2.specs import attention_spec, common_spec, model_spec, transformer_spec
from torch import Tensor, nn
from torch.nn import functional as F

from fairseq_posenc.encodings.base import Dims
from fairseq_posenc.encodings.rope import Rope
from fairseq_posenc.encodings.terms import Terms
from fairseq_posenc.errors import UserError
from fairseq_posenc.folders import whole_folder
from fairseq_posenc.shared import Shared
from fairseq_posenc.workbench.convert import comparison, tokenizer
from fairseq_posenc.workbench.convert.card import format_serving_usage, write_card
from fairseq_posenc.workbench.convert.stock_classes import refuse_unsupported_parts
from fairseq_posenc.workbench.loading.open_model import OpenModel

# Names of encodings. In prompts of causal LMs, CTranslate2 gets distances of other biases wrong.
FOR_CAUSAL_LMS = {"alibi", "learned", "lerope", "none", "rope", "shaw", "shaw_values", "sinusoidal"}
FOR_TRANSLATION = FOR_CAUSAL_LMS | {"sandwich", "t5"}
_ACTIVATIONS = {
    "relu": common_spec.Activation.RELU,
    "gelu": common_spec.Activation.GELU,
    "gelu_fast": common_spec.Activation.GELUTanh,
    "gelu_accurate": common_spec.Activation.GELUTanh,
    "tanh": common_spec.Activation.Tanh,
}


def export_to_ctranslate2(
    trained: OpenModel, quantization: str, tokens: str | None, out: Path
) -> list[str]:
    """Write a folder that CTranslate2 reads, compare the two models, and return lines for the user.

    Args:
        trained: the model.
        quantization: ``float32``, ``float16`` or ``int8``.
        tokens: value of ``--tokens``; None to find a tokenizer in the folder of the data.
        out: the folder.

    Raises:
        UserError: CTranslate2 cannot compute the model, or its scores differ.
    """
    _refuse_unsupported(trained)
    tokenizers = tokenizer.build_tokenizers(trained, tokens)
    vocabularies = tokenizer.list_vocabularies(trained, tokenizers)
    with whole_folder(out) as folder:  # renamed to `out` at the end
        folders = tokenizer.write_tokenizers(trained, tokenizers, folder)
        build_specification(trained, vocabularies, "float32").save(str(folder))
        difference = _compare_log_probs(trained, vocabularies, folder)
        specs = " and ".join(sorted(set(map(str, trained.positions.values()))))
        lacks = f"--to ctranslate2: CTranslate2 lacks an option of the model, perhaps of {specs}"
        comparison.refuse_difference(f"{lacks}: log probabilities differ", difference)
        notes = [f"log probabilities in float32 differ by {difference:.1e} of the largest one"]
        if quantization != "float32":
            build_specification(trained, vocabularies, quantization).save(str(folder))
        write_card(folder, trained, "ctranslate2", format_serving_usage(trained, folders), notes)
    return [f"wrote {out}: a CTranslate2 model in {quantization}", *notes]


def _refuse_unsupported(trained: OpenModel) -> None:
    """Refuse a model, an activation or an encoding that CTranslate2 lacks."""
    lacks = "--to ctranslate2: CTranslate2 does not support"
    known = {"translation": FOR_TRANSLATION, "causal_lm": FOR_CAUSAL_LMS}.get(trained.head)
    if known is None:
        raise UserError(f"{lacks} a {trained.head} model, only translation models and causal LMs")
    refuse_unsupported_parts(trained, "CTranslate2")
    for stack in trained.stacks.values():
        spec, activation = stack.spec, stack.cfg.activation_fn
        if activation not in _ACTIVATIONS:
            raise UserError(f"{lacks} the activation {activation}, only {', '.join(_ACTIVATIONS)}")
        if others := sorted(spec.names - known):
            raise UserError(f"{lacks} {spec}: {others[0]} is not one of {', '.join(sorted(known))}")


@torch.no_grad()
def _compare_log_probs(trained: OpenModel, vocabularies: list[list[str]], folder: Path) -> float:
    """Compute the largest difference of log probabilities, as a share of the largest one.

    The trained model, in evaluation mode, and that of the folder score the same random sentences.
    """
    end = torch.tensor([trained.model.decoder.eos_idx])
    ours, lines = [], []
    stacks = trained.stacks.values()  # up to 8 tokens beyond the trained ones, and <s>, cut below
    lengths = [min(1024, x.dims.max_positions + 8, _count_positions(x)) + 1 for x in stacks]
    for row in zip(*comparison.draw_batch(trained.model, "right", lengths)):  # padded right
        # Without padding and the ends, which are added; a causal LM has only a target.
        sentences = [ids[ids.ne(comparison.PADDING)][1:-1] for ids in row]
        inputs = [torch.cat([ids, end])[None] for ids in sentences[:-1]]  # batches of one
        inputs.append(torch.cat([end, sentences[-1]])[None])  # both models read </s> first
        scores = comparison.compute_scores(trained.model, trained.head, *inputs)[0]
        expected = torch.cat([sentences[-1], end])[:, None]
        ours.append(scores.log_softmax(-1).gather(1, expected)[:, 0])
        lines.append([[names[i] for i in ids] for names, ids in zip(vocabularies, sentences)])
    if trained.head == "translation":  # max_input_length=0: sentences are never cut
        sides = map(list, zip(*lines))
        results = ctranslate2.Translator(str(folder)).score_batch(*sides, max_input_length=0)
    else:
        texts = [["</s>", *line, "</s>"] for (line,) in lines]
        results = ctranslate2.Generator(str(folder)).score_batch(texts, max_input_length=0)
    log_probs = torch.cat(ours)
    theirs = torch.tensor([value for result in results for value in result.log_probs])
    return float((log_probs - theirs).abs().max() / log_probs.abs().max())


@torch.no_grad()
def build_specification(trained: OpenModel, vocabularies: list[list[str]], dtype: str) -> Any:
    """Build CTranslate2's specification of a model: a tree of layers, whose leaves are the weights.

    Args:
        trained: the model.
        vocabularies: symbols of each dictionary, the source's first.
        dtype: ``float32``, ``float16`` or ``int8``.
    """
    stacks = {name: _build_stack(trained, stack) for name, stack in trained.stacks.items()}
    if trained.head == "translation":
        specification: Any = transformer_spec.TransformerSpec(stacks["encoder"], stacks["decoder"])
        specification.register_source_vocabulary(vocabularies[0])
        specification.register_target_vocabulary(vocabularies[-1])
        # fairseq's decoders begin with </s>, as do its causal LMs without --add-bos-token.
        specification.config.decoder_start_token = specification.config.eos_token
        specification.config.add_source_eos = True
    else:
        specification = transformer_spec.TransformerDecoderModelSpec(stacks["decoder"])
        specification.register_vocabulary(vocabularies[0])
        if not trained.settings.task.add_bos_token:  # the engine leaves it out of its results
            specification.config.bos_token = specification.config.eos_token
    specification.validate()
    specification.optimize(dtype)
    return specification


def _count_positions(stack: Any) -> int:
    """Count the positions of an export: at least the 1,024 that CTranslate2 reads by default."""
    limit: int = getattr(stack.embed_positions, "max_positions", 1024)  # fewer in trained tables
    return max(stack.dims.max_positions, min(1024, limit))


def _build_stack(trained: OpenModel, stack: Any) -> Any:
    """Build an encoder or a decoder with its weights and positions."""
    dims: Dims = stack.dims
    is_translation = trained.head == "translation"
    # ALiBi's is the only bias of causal LMs (`FOR_CAUSAL_LMS`), and CTranslate2 computes it itself.
    has_alibi = not is_translation and any(item.name == "alibi" for item in stack.spec.items)
    style = {
        "num_heads": dims.num_heads,
        "pre_norm": stack.layers[0].normalize_before,
        "no_final_norm": stack.layer_norm is None,
        "activation": _ACTIVATIONS[stack.cfg.activation_fn],
        "layernorm_embedding": stack.layernorm_embedding is not None,
    }
    if dims.causal:
        style["with_encoder_attention"] = is_translation
        spec: Any = transformer_spec.TransformerDecoderSpec(len(stack.layers), **style)
        spec.alibi = has_alibi  # as an argument, it would leave out the table filled below
    else:
        spec = transformer_spec.TransformerEncoderSpec(len(stack.layers), **style)
    tokens = torch.full((1, _count_positions(stack)), comparison.FIRST_WORD)  # not padding
    # What a forward pass computes once for all layers with the same encodings, by their `kind`.
    states: tuple[Shared, ...] = stack.compute_states(tokens)
    for layer_spec, layer in zip(spec.layer, stack.layers):
        state = states[layer.self_attn.kind]
        rope = next((x for x in state.encodings if isinstance(x, Rope)), None)
        terms = layer.self_attn.compute_terms(state).expanded()  # with a row for every distance
        layer_spec.self_attention = _build_attention(rope, terms, has_alibi, dims)
    # Without a table of vectors at the input, CTranslate2 would add sinusoids.
    vectors = torch.zeros(tokens.size(1), dims.embed_dim)  # [T, C]
    if stack.embed_positions is not None:
        (encoding,) = stack.embed_positions.encodings.values()  # `parse` refuses two of them
        (vectors,) = encoding.embed(states[0].positions)  # [1, T, C]; all states have equal ones
    table = F.pad(vectors, (0, 0, 1, 0))  # the converter drops padding's row, the first
    copied = copy.deepcopy(stack)  # quantization changes weights in place
    copied.embed_positions = nn.Embedding.from_pretrained(table, padding_idx=0)
    if dims.causal:  # CTranslate2's converter for fairseq copies all weights, and this table
        converter.set_transformer_decoder(spec, copied, is_translation)
    else:
        converter.set_transformer_encoder(spec, copied)
    return spec


def _build_attention(rope: Rope | None, terms: Terms, has_alibi: bool, dims: Dims) -> Any:
    """Build the specification of a layer's self-attention, with only its positions set.

    Args:
        rope: the layer's rotation.
        terms: the layer's terms; tables have a row for each distance, key minus query, from low.
        has_alibi: whether CTranslate2 computes their bias itself.
        dims: sizes of the stack.
    """
    query_rows, value_rows = terms.rows("query"), terms.rows("value")
    # Both (1, distances, head_dim); with rows for each head, the comparison finds a difference.
    keys = None if query_rows is None else query_rows.table  # added to the keys that queries see
    values = None if value_rows is None else value_rows.table  # added to values
    if keys is None and values is not None:
        keys = torch.zeros_like(values)  # CTranslate2 reads values only if there are keys
    bias = None if terms.bias is None or has_alibi else terms.bias.table  # (H or 1, distances)
    rotary: dict[str, Any] = {}
    if rope is not None:
        rotary = {
            "rotary_dim": rope.rotated,  # coordinates of a head that are rotated
            "rotary_interleave": rope.layout == "interleaved",
            "rotary_scaling_type": attention_spec.RotaryScalingType.Su,  # a factor for each pair
        }
    spec = attention_spec.MultiHeadAttentionSpec(
        self_attention=True,
        relative_position=keys is not None,
        relative_attention_bias=bias is not None,
        **rotary,
    )
    spec.queries_scale = terms.scale(dims.head_dim)  # usually 1 / sqrt(head_dim), the default
    if rope is not None:
        theirs = 10_000.0 ** -(torch.arange(0, rope.rotated, 2) / rope.rotated)
        factors = (theirs / rope.angles_per_position()).numpy()  # CTranslate2 divides its angles
        spec.rotary_scaling_short_factor = spec.rotary_scaling_long_factor = factors
        spec.queries_scale *= rope.gain**2  # the gain multiplies rotated queries and keys
    if keys is not None:
        spec.relative_position_keys = keys[0].numpy()
        spec.relative_position_values = model_spec.OPTIONAL if values is None else values[0].numpy()
    if bias is not None:
        _set_bias(spec, bias, dims)
    return spec


def _set_bias(spec: Any, bias: Tensor, dims: Dims) -> None:
    """Set a bias by distance, ``(H or 1, 2 T - 1)``, as T5's, with a bucket for each distance.

    T5 has buckets for earlier keys, by distance, then for later keys. On each side, the first half
    of the buckets have one distance each, the others are ranges up to a largest distance. Here
    T - 2 is in the first range, T - 1 and more in the last. The largest distance must be T - 1:
    in layers with vectors by distance, CTranslate2 takes it from their number.
    """
    length = bias.size(1) // 2 + 1  # T
    past, later = bias[:, :length].flip(1), bias[:, length - 1 :]  # [H or 1, T] from distance 0
    sides = [past] if dims.causal else [past, later]
    largest = max(3, length - 1)  # T is less than 4 beside a trained table with so few rows
    buckets = torch.cat([F.pad(x, (0, 2 * largest - 2 - length), "replicate") for x in sides], 1)
    spec.relative_attention_bias = buckets.expand(dims.num_heads, -1).t().contiguous().numpy()
    spec.relative_attention_max_distance = torch.tensor(largest, dtype=torch.int32).numpy()
