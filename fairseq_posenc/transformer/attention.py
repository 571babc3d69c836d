"""Adapts fairseq's self-attention: its arguments and its cache, for :class:`AttentionCore`."""

from typing import Any, NamedTuple

import torch
from fairseq.modules import MultiheadAttention
from torch import Tensor

from fairseq_posenc.backends import attend
from fairseq_posenc.backends.base import AttentionCall
from fairseq_posenc.backends.projected_rows import ProjectedRows
from fairseq_posenc.encodings.base import Dims, Encodings
from fairseq_posenc.encodings.term import Decay
from fairseq_posenc.errors import UserError
from fairseq_posenc.modules.attention_core import AttentionCore, Kept, append_to_kept, use_kept
from fairseq_posenc.specs import Spec
from fairseq_posenc.transformer.forward_context import state_of_kind

_NO_TORCHSCRIPT = "TorchScript is not supported: encodings and backends are chosen in Python"


class _Past(NamedTuple):
    """What earlier steps of decoding have left for the next one; nothing, in other passes."""

    kept: Kept | None = None  # their keys and values
    has_padding: bool = False
    decay: Decay | None = None  # sums of logarithms of forget gates, as two parts, `(B, H, S, 2)`
    rows: ProjectedRows | None = None  # of DeBERTa's table, for this step to extend; None: no cache


class PositionalAttention(AttentionCore, MultiheadAttention):
    """fairseq's self-attention with position encodings, directions and a choice of backend.

    Decoder layers, BERT's initialization and beam search rely on fairseq's class, which has the
    projections, the format of caches and their reordering; `AttentionCore` has the steps.

    Args:
        embed_dim: C, the width of the model.
        num_heads: H, the number of heads.
        encodings: the encodings of this layer, without the one at the input.
        direction: ``both``; ``lr``, keys up to the query (causal); ``rl``, keys from the query on.
        backend: ``auto`` or the name of a backend.
        stack: spec and sizes of its stack; a position state of another stack is refused.
        kind: index of the layer among the different ones of its spec: 0 or 1 in ``3*rope,none``.
        **kwargs: passed on to fairseq's class.
    """

    batch_first = False  # AttentionCore's steps read it: inputs are (T, B, C)

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        encodings: Encodings,
        direction: str = "both",
        backend: str = "auto",
        stack: tuple[Spec, Dims] | None = None,
        kind: int = 0,
        **kwargs: Any,
    ) -> None:
        has_xformers = kwargs.get("xformers_att_config") is not None  # {}: with its defaults
        if has_xformers or kwargs.get("add_bias_kv") or kwargs.get("add_zero_attn"):
            raise UserError("positions do not work with xformers or added key biases: remove these")
        super().__init__(embed_dim, num_heads, self_attention=True, **kwargs)
        self.encodings = encodings
        self.direction, self.backend = direction, backend
        self.stack, self.kind = stack, kind

    def __prepare_scriptable__(self) -> None:
        """Refuse ``torch.jit.script``, which calls this method of every submodule."""
        raise UserError(_NO_TORCHSCRIPT)

    def _adaptive_prune_heads(self, reserve_head_index: list[tuple[int, int]]) -> None:
        """Refuse fairseq's pruning of heads, which does not prune the encodings' tables by head."""
        raise UserError("heads cannot be pruned: tables by head would keep the rows of all heads")

    def forward(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        key_padding_mask: Tensor | None = None,
        incremental_state: dict[str, Any] | None = None,
        need_weights: bool = True,
        static_kv: bool = False,
        attn_mask: Tensor | None = None,
        before_softmax: bool = False,
        need_head_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend as fairseq's class does, but only in a stack, which computes the position state.

        Inputs and outputs are ``(T, B, C)``, weights ``(B, T, S)``; key and value are not read.

        Raises:
            UserError: ``static_kv`` or ``before_softmax``, which self-attention never needs; or
                ``torch.jit.trace``, which would keep the lengths and padding of its example.
        """
        if torch.jit.is_tracing():
            raise UserError(_NO_TORCHSCRIPT)
        if static_kv or before_softmax:
            raise UserError("static_kv and before_softmax have no meaning in self-attention here")
        shared = state_of_kind(self.stack, self.kind)  # refuses a call from outside the stack
        positions = shared.positions  # of all S tokens; the queries are the last T
        past = self._read_past(incremental_state)
        # fairseq gives the padding of the new tokens, None if none is padding. A mask is needed if
        # they or earlier tokens have padding; the positions have that of all, `(B, S)`.
        is_padded = key_padding_mask is not None or past.has_padding
        padding = positions.padding if is_padded else None
        of_input = self.encodings.input_terms(query.transpose(0, 1), positions, past.decay)
        terms = self.compute_terms(shared, past.rows) | of_input  # all that is added to the scores
        q, k, v = self.project(query)  # [B, H, T, D] each
        q, k = self.rotate_tokens(q, k, shared)
        mask = shared.mask.with_direction(self.direction)._replace(
            key_padding=padding,
            # fairseq's additive masks mean "not this pair". Added as finite values such as -1e8,
            # they could be outweighed by other terms.
            pairs=None if attn_mask is None else attn_mask.bool(),
        )
        drops = self.dropout_module.training or self.dropout_module.apply_during_inference
        dropout = float(self.dropout_module.p) if drops else 0.0
        call = AttentionCall(q, k, v, terms, mask, dropout, need_weights or need_head_weights)
        if incremental_state is not None:
            kept = append_to_kept(past.kept, k, v, positions.src_len)
            call = use_kept(call, kept, positions.src_len)  # also to keys of earlier steps
            needed = kept.select(shared.needed_keys(), positions.src_len)  # by later queries
            self._store_past(incremental_state, needed, padding, of_input.find(Decay))
        attended, weights = attend(call, self.backend)
        if weights is not None:
            # [B, H, T, S] -> [H, B, T, S] or [B, T, S], as fairseq's class returns them
            weights = weights.transpose(0, 1) if need_head_weights else weights.mean(1)
        return self.project_output(attended), weights

    def _read_past(self, state: dict[str, Any] | None) -> _Past:
        """Read fairseq's cache, whose tensors have a row for each sentence, as beams do."""
        if state is None:
            return _Past()
        # All sentences share the rows by distance; beam search reorders nothing under this key.
        rows = state.setdefault(self._get_full_incremental_state_key("rows"), ProjectedRows())
        buffer: dict[str, Any] = self._get_input_buffer(state)  # {} in the first step
        if not buffer:
            return _Past(rows=rows)
        places, sums = buffer["prev_places"], buffer["prev_decay"]
        places = None if places is None else places[0].cpu()  # indices of tokens; equal in all rows
        kept = Kept(buffer["prev_key"], buffer["prev_value"], places)
        has_padding = buffer["prev_key_padding_mask"] is not None
        return _Past(kept, has_padding, None if sums is None else Decay(sums), rows)

    def _store_past(self, state: Any, kept: Kept, padding: Any, decay: Decay | None) -> None:
        """Store what later steps need of S tokens so far: keys, padding ``(B, S)``, and decay."""
        if (places := kept.places) is not None:
            places = places.to(kept.key.device).expand(len(kept.key), -1)  # a row by sentence
        buffer = {
            "prev_key": kept.key,
            "prev_value": kept.value,
            "prev_key_padding_mask": padding,
            "prev_places": places,
            "prev_decay": None if decay is None else decay.earlier,  # `(B, H, S, 2)`
        }
        self._set_input_buffer(state, buffer)
