"""Describes families of transformers' models: which parts of a model its positions consist of.

H heads, G of them with keys of their own, D head size, C model size, R rows of a table.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from fairseq_posenc.encodings.base import Dims
from fairseq_posenc.errors import UserError
from fairseq_posenc.hf.settings import POSITIONS
from fairseq_posenc.hf.stand_ins import NoBias, NoPositions, NoRotation
from fairseq_posenc.identity import format_directions
from fairseq_posenc.specs import Spec

AFTER_PADDING = -1  # a value of `first_row`, for the padding symbol's id plus 1, as in fairseq


@dataclass(frozen=True)
class Family:
    """The names of the parts of a model that its own positions consist of; empty for no such part.

    Paths are those of ``get_submodule``. BERT's stack, for example, is the base model itself, with
    layers at ``encoder.layer``, and a layer's self-attention is at ``attention.self``.
    """

    stacks: tuple[str, ...] = ("",)  # paths of the stacks of layers in the base model
    layers: str = "layers"  # path of the list of layers in a stack
    attention: str = "self_attn"  # path of the self-attention in a layer
    rotary: str = ""  # name of a stack's module that computes cosines and sines; it may be None
    # Form of the cosines. `doubled`: the cosines of all pairs, twice, for the two halves of a head;
    # `half`: only once; `pairs`: each one twice, for two adjacent coordinates; `doubled_pairs`: as
    # `doubled`, but the model rotates adjacent coordinates and reads the first half.
    cosines: Literal["doubled", "half", "pairs", "doubled_pairs"] = "doubled"
    partial: bool = False  # whether its code reads `partial_rotary_factor`; else it rotates all
    # Pairs of coordinates that each axis rotates, where `rope_parameters` has no `mrope_section`;
    # empty if positions are on one axis.
    sections: tuple[int, ...] = ()
    # `blocks`: the pairs of an axis are adjacent; `interleaved`: the axes take turns.
    pairs: Literal["blocks", "interleaved"] = "blocks"
    rotation_flag: str = ""  # attribute of an attention, true if it rotates; empty if all rotate
    table: str = ""  # path of the table of positions in a stack
    # Layout of that table if it holds sinusoids, not trained rows: `half` for all sines, then all
    # cosines; `fairseq`, the same with other frequencies, the first token at padding's id + 1.
    sinusoids: Literal["", "half", "fairseq"] = ""
    first_row: int = 0  # row of position 0 in a trained table, or AFTER_PADDING
    scale: str = ""  # attribute of a stack that is the factor of its embeddings
    # Names of the query and key projections in an attention, or only the name of the projection
    # that contains all; in `query_key_value`, query, key and value of a head are side by side.
    projections: tuple[str, ...] = ("q_proj", "k_proj")
    # The projection under whose weight's name files store our record of the positions, so that
    # stock classes fail on its shape; empty for the first of `projections`.
    guarded: str = ""
    bias: str = ""  # path of the table of distances in the first layer's attention
    sinks: str = ""  # name of the parameter of sinks in an attention
    temperature: str = ""  # key of `rope_parameters` for larger scores of later queries

    def find_stacks(self, model: PreTrainedModel) -> "list[Stack]":
        """List the stacks of a model, the encoder first.

        A model may have fewer than its family, such as an encoder with a head. One that has none
        is a part of a model, and is refused.
        """
        parts: dict[str, Any] = dict(model.base_model.named_modules())  # without a head
        layers = {name: f"{name}.{self.layers}".lstrip(".") for name in self.stacks}
        stacks = [Stack(self, parts[name]) for name, path in layers.items() if path in parts]
        if not stacks:
            raise UserError(f"{type(model).__name__} is a part: set the positions of its model")
        return stacks

    def first_id(self, config: PretrainedConfig) -> int:
        """Return the position id of a text's first token in the model's code; most begin at 0."""
        if self.first_row != AFTER_PADDING:
            return 0
        if config.pad_token_id is None:
            raise UserError("pad_token_id is None, and positions of this model begin after it")
        return int(config.pad_token_id) + 1

    def applies_cosines(self, attention: nn.Module) -> bool:
        """Check whether an attention rotates by cosines that are passed to it."""
        rotates = not self.rotation_flag or bool(getattr(attention, self.rotation_flag))
        return bool(self.rotary) and rotates

    def project_rows(self, attention: nn.Module, rows: Tensor, dims: Dims) -> tuple[Tensor, Tensor]:
        """Project rows ``(R, C)`` to a layer's queries and keys, both ``(H, R, D)``.

        Refused if PEFT gives each text of a batch an adapter of its own, as rows belong to no text.
        """
        projections = [attention.get_submodule(name) for name in self.projections]
        for hook in (x for part in projections for x in part._forward_pre_hooks.values()):
            if "adapter_names" in getattr(hook, "keywords", {}):  # of PEFT's partial
                raise UserError(
                    "adapter_names: these positions have rows that are projected once for all "
                    "texts of a batch: pass the texts of one adapter at a time"
                )
        projected = [projection(rows) for projection in projections]
        if len(projected) == 2:
            query, key = projected
        # GPTBigCode alone has `multi_query`; if it is False, the projection has this form.
        elif "query_key_value" in self.projections or not getattr(attention, "multi_query", True):
            by_head = projected[0].unflatten(-1, (dims.num_heads, 3, -1))  # [R, H, q or k or v, D]
            query, key = by_head[:, :, 0].flatten(1), by_head[:, :, 1].flatten(1)
        else:  # all queries, then all keys, then as many values
            query, keys_and_values = projected[0].tensor_split([dims.all_heads_dim], -1)
            key = keys_and_values.chunk(2, -1)[0]
        # A head's queries may be followed by a gate of its output. There are G heads of keys.
        query = query.unflatten(-1, (dims.num_heads, -1))[..., : dims.head_dim].transpose(0, 1)
        key = key.unflatten(-1, (-1, dims.head_dim)).transpose(0, 1)  # [G, R, D]
        return query, key.repeat_interleave(dims.num_heads // key.size(0), 0)


class Stack(NamedTuple):
    """A stack of layers in a model, with its family."""

    family: Family
    module: PreTrainedModel

    @property
    def config(self) -> PretrainedConfig:
        """The configuration of the stack; an encoder and a decoder may have different ones."""
        return self.module.config

    @property
    def layers(self) -> list[nn.Module]:
        """All layers."""
        return [*self.module.get_submodule(self.family.layers).children()]

    @property
    def attentions(self) -> list[Any]:
        """The self-attention of all layers that have it: in hybrids not all do.

        Layers of a spec, and all lists "for each layer", are in the order of this list.
        """
        path = self.family.attention
        return [x.get_submodule(path) for x in self.layers if hasattr(x, path.split(".")[0])]

    @property
    def is_hybrid(self) -> bool:
        """Whether some layers have no attention, but convolutions, for example."""
        return len(self.attentions) < len(self.layers)

    @property
    def is_decoder(self) -> bool:
        """Whether attention was built for queries that cannot see later keys."""
        return bool(getattr(self.attentions[0], "is_causal", False))

    @property
    def causal(self) -> bool:
        """Whether queries cannot see later keys, as transformers' masks decide it."""
        return self.is_decoder and bool(getattr(self.config, "is_causal", True))

    @property
    def is_decoder_alone(self) -> bool:
        """Whether this is a decoder without an encoder, so that caches have only its own keys."""
        attends_to_source = getattr(self.config, "add_cross_attention", False)
        return self.causal and not (self.config.is_encoder_decoder or attends_to_source)

    @property
    def attends_plainly(self) -> bool:
        """Whether the model's own attention has only rotated products and a causal mask.

        Of a decoder alone, only its attentions' windows matter, which they read when they were
        built: ``set_positions`` replaces the one in the configuration by that of the spec.
        """
        parts = self.attentions if self.is_decoder_alone else [self.config, *self.attentions]
        windows = [getattr(part, "sliding_window", None) for part in parts]
        cap = getattr(self.config, "attn_logit_softcapping", None)
        return not (self.family.bias or self.family.sinks or cap or any(windows))

    @property
    def num_heads(self) -> int:
        """H; a decoder may have a different number from its encoder."""
        own = getattr(self.config, "decoder_attention_heads", None) if self.is_decoder else None
        return int(own or self.config.num_attention_heads)

    @property
    def head_widths(self) -> list[int]:
        """D of each attention, which differs in Gemma 4."""
        if all(hasattr(attention, "head_dim") for attention in self.attentions):
            return [attention.head_dim for attention in self.attentions]
        width = getattr(self.config, "head_dim", None) or self.config.hidden_size // self.num_heads
        return [width] * len(self.attentions)

    def refuse_other_layers(self, spec: Spec) -> None:
        """Refuse a spec read from the model that no longer fits: layers were removed or added."""
        if (positions := getattr(self.module, POSITIONS, None)) is not None:
            plans = [getattr(getattr(x, POSITIONS, None), "plan", None) for x in self.attentions]
            # A kind: the index of encodings in `spec.layer_kinds`.
            fits = all(x and x.kind == spec.layer_kind(index) for index, x in enumerate(plans))
            fits = fits and len(spec.layers) <= len(plans)  # else loading refuses the list
            if fits and not positions.dims.causal:
                fits = format_directions([x.direction for x in plans if x]) == positions.directions
        else:
            flags = [self.family.applies_cosines(attention) for attention in self.attentions]
            # EXAONE 4 without a window rotates in all layers, although no flag says so.
            can_compare = self.family.rotation_flag and any(flags)
            fits = not can_compare or flags == spec.list_rotated(len(flags))  # bools by layer
        if not fits:
            raise UserError(
                "layers of this model were removed or added, so its spec no longer describes them: "
                "call set_positions with those of each layer (own, if only the last were removed)"
            )

    @property
    def weight_names(self) -> dict[str, str]:
        """Names of our position parameters -> names of the same weights in the stock model.

        The last is in an attention, the others in the stack. Names of a missing part fit no weight.
        """
        family = self.family
        return {
            "input.learned.table.weight": "" if family.sinusoids else f"{family.table}.weight",
            "shared.t5.table": f"{family.layers}.0.{family.attention}.{family.bias}.weight",
            "encodings.sink.score": family.sinks,
        }

    def read_weights(self, owner: nn.Module) -> dict[str, Tensor]:
        """Return the weights of positions in the stack's module or an attention, by our names."""
        if (positions := getattr(owner, POSITIONS, None)) is not None:
            return dict(positions.named_parameters())
        present: dict[str, Tensor] = dict(owner.named_parameters())
        weights = {ours: present[x] for ours, x in self.weight_names.items() if x in present}
        for name, weight in weights.items():
            if "learned" in name:
                weights[name] = weight[self.first_row :]
            elif "t5" in name:
                weights[name] = weight.t()  # ours is [H, buckets]
        return weights

    @property
    def first_row(self) -> int:
        """The row of position 0 in the model's table: the family's, or the first after padding."""
        return max(self.family.first_row, self.family.first_id(self.config))  # AFTER_PADDING is -1

    def neutralize(self) -> None:
        """Remove the model's own positions, sinks and temperature: a spec names what it keeps."""
        family = self.family
        if getattr(self.module, family.rotary, None) is not None:
            self.module.set_submodule(family.rotary, NoRotation())
        if hasattr(self.config, "layer_rope_theta"):  # granite_swa: bases of layers, 0 for none
            # The model's code then passes no cosines to its attention, which gets ours.
            self.config.layer_rope_theta = [0] * self.config.num_hidden_layers
        if family.temperature:
            self.config.rope_parameters[family.temperature] = 0.0
        if family.table:
            self.module.set_submodule(family.table, NoPositions())
        if family.bias:
            self.attentions[0].set_submodule(family.bias, NoBias())
        if family.sinks:
            for attention in self.attentions:
                delattr(attention, family.sinks)
                # No parameter, but transformers initializes a tensor of this name on loading.
                setattr(attention, family.sinks, torch.empty(0))

    def find_cosine_width(self, attention: nn.Module) -> int:
        """Find the width of the cosines that an attention takes; 0 for none."""
        layer_type = getattr(attention, "layer_type", "")
        for part in self.attentions:  # if set before; `attention` may be of a layer added since
            positions = getattr(part, POSITIONS, None)
            if positions is not None and getattr(part, "layer_type", "") == layer_type:
                return int(positions.plan.cosine_width)
        rotary = getattr(self.module, self.family.rotary, None)
        buffers = {} if rotary is None else dict(rotary.named_buffers())
        # The frequencies of all pairs of coordinates: by type of layer in some models.
        usual = next(iter(buffers.values()), torch.empty(0))
        frequencies = buffers.get(f"{layer_type}_inv_freq", usual)
        return frequencies.numel() * (1 if self.family.cosines == "half" else 2)


_ROTARY = Family(rotary="rotary_emb")
_PARTIAL = replace(_ROTARY, partial=True)
_QWEN3_VL = replace(_ROTARY, sections=(24, 20, 20), pairs="interleaved")
_BERT = Family(
    layers="encoder.layer",
    attention="attention.self",
    table="embeddings.position_embeddings",
    projections=("query", "key"),
)
_ROBERTA = replace(_BERT, first_row=AFTER_PADDING)
_BART = Family(stacks=("encoder", "decoder"), table="embed_positions")

# Values of `model_type` in configurations -> the family of these models, which are built alike.
_TYPES: dict[str, Family] = {
    """
        apertus apertus1p5_text arcee aria_text bitnet cwm dots1 eurobert flex_olmo gemma gemma2
        gemma3_text gemma4_text granite granitemoe granitemoeshared hunyuan_v1_dense hunyuan_v1_moe
        hy_v3 hyperclovax jais2 lfm2 llama ministral mistral mixtral olmo olmo2 olmo3 olmo_hybrid
        olmoe phimoe qwen2 qwen2_moe qwen3 qwen3_moe seed_oss starcoder2 vaultgemma
    """: _ROTARY,
    "glm4_moe laguna mellum minimax_m2 phi qwen3_next solar_open": _PARTIAL,
    # Their stock files join queries, keys and values, and so have no name of a query projection.
    "gte jina_embeddings_v3 molmo2_text nomic_bert": replace(_ROTARY, guarded="o_proj"),
    "bert bert-generation electra ernie": _BERT,
    "camembert data2vec-text roberta roberta-prelayernorm xlm-roberta xlm-roberta-xl": _ROBERTA,
    "distilbert": replace(
        _BERT, layers="transformer.layer", attention="attention", projections=("q_lin", "k_lin")
    ),
    "blenderbot": _BART,
    "bart mbart plbart": replace(_BART, first_row=2),  # two rows are unused
    "marian pegasus": replace(_BART, scale="embed_scale", sinusoids="half"),
    "m2m_100": replace(_BART, sinusoids="fairseq"),  # its code takes no ids, and counts by itself
    "whisper": replace(_BART, stacks=("decoder",)),  # its encoder reads audio, not tokens
    "opt": Family(stacks=("decoder",), table="embed_positions", first_row=2),
    "biogpt": Family(table="embed_positions", first_row=2),
    "gpt2 gpt_bigcode": Family(layers="h", attention="attn", table="wpe", projections=("c_attn",)),
    "mt5 t5": Family(
        stacks=("encoder", "decoder"),
        layers="block",
        attention="layer.0.SelfAttention",
        bias="relative_attention_bias",
        projections=("q", "k"),
    ),
    "ernie4_5 ernie4_5_moe helium": replace(_ROTARY, cosines="doubled_pairs"),
    "glm glm4": replace(_PARTIAL, cosines="doubled_pairs"),
    "cohere": replace(_ROTARY, cosines="pairs"),
    "cohere2": replace(_ROTARY, cosines="pairs", rotation_flag="sliding_window"),
    "glm4v_text glm_ocr_text": replace(_PARTIAL, cosines="pairs", sections=(8, 12, 12)),
    "gpt_oss": replace(_ROTARY, cosines="half", sinks="sinks"),
    "granite_swa granitemoe_swa": replace(_ROTARY, sinks="sinks"),
    "afmoe": replace(_ROTARY, rotation_flag="is_local_attention"),
    "exaone4 exaone_moe kolibri1": replace(_ROTARY, rotation_flag="is_sliding"),
    "lfm2_moe": replace(_ROTARY, rotary="pos_emb"),
    "ministral3": replace(_ROTARY, temperature="llama_4_scaling_beta"),
    "modernbert": replace(_ROTARY, attention="attn", projections=("Wqkv",)),
    "modernbert-decoder": replace(_ROTARY, attention="attn"),
    "persimmon": replace(_PARTIAL, projections=("query_key_value",)),
    "gpt_neox": replace(_PARTIAL, attention="attention", projections=("query_key_value",)),
    "phi3": replace(_PARTIAL, projections=("qkv_proj",)),
    "glm4v_moe_text glm_image_text": replace(_PARTIAL, sections=(8, 12, 12)),
    "qwen2_vl_text qwen2_5_vl_text": replace(_ROTARY, sections=(16, 24, 24)),
    "cosmos3_edge_text qwen3_vl_text qwen3_vl_moe_text": _QWEN3_VL,
    "qwen3_5_text qwen3_5_moe_text": replace(_PARTIAL, sections=(11, 11, 10), pairs="interleaved"),
    "smollm3": replace(_ROTARY, rotation_flag="use_rope"),
}
FAMILIES = {name: family for names, family in _TYPES.items() for name in names.split()}


def find_family(config_class: type) -> Family | None:
    """Find the family of a configuration class, which may be derived from one of a known type."""
    types = [getattr(cls, "model_type", "") for cls in config_class.__mro__]
    return next((FAMILIES[name] for name in types if name in FAMILIES), None)
