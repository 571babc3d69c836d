"""Builds fairseq's encoder and decoder with our encodings; ``models`` use them.

A stack computes what its layers share once per forward pass. Layers never see tokens, so
:mod:`~fairseq_posenc.transformer.forward_context` passes this to them.
B batch, S all tokens, T queries (one in a step of decoding), C width of the model.
"""

from contextlib import AbstractContextManager
from itertools import groupby
from typing import Any, cast

import torch
from fairseq.models.transformer import TransformerDecoderBase, TransformerEncoderBase
from torch import Tensor, nn

from fairseq_posenc import assembly
from fairseq_posenc.encodings.base import Encoding, Encodings
from fairseq_posenc.encodings.term import Reset
from fairseq_posenc.errors import UserError
from fairseq_posenc.identity import Identity, format_directions
from fairseq_posenc.modules.input_checks import read_position_ids
from fairseq_posenc.position_parameters import is_position_parameter
from fairseq_posenc.positions import Positions
from fairseq_posenc.shared import Shared, compute_shared
from fairseq_posenc.transformer.forward_context import current_context, set_context
from fairseq_posenc.transformer.layers import (
    PositionalDecoderLayer,
    PositionalEncoderLayer,
    wrap_layer,
)
from fairseq_posenc.transformer.options import StackSettings, read_weight_settings


class InputPositions(nn.Module):
    """Adds the input encoding's vectors to the token embeddings: fairseq's ``embed_positions``."""

    dtype_marker: Tensor

    def __init__(self, encodings: Encodings) -> None:
        super().__init__()
        self.encodings = encodings  # one (specs refuse two), under its name in state dicts
        (encoding,) = encodings.as_list()
        # fairseq reads this length of a table; without one it is 1e5, as for fairseq's sinusoids.
        self.max_positions: int = getattr(encoding, "max_positions", int(1e5))
        # Vectors are computed in float32, and converted to the dtype of this buffer, the model's.
        self.register_buffer("dtype_marker", torch.zeros(()), persistent=False)

    def forward(self, tokens: Tensor, incremental_state: dict[str, Any] | None = None) -> Tensor:
        """Compute vectors ``(B or 1, T, C)``; when decoding, only that of the last token.

        A call outside a stack's forward pass, which numbers the tokens, is refused.
        """
        if (states := current_context()) is None:
            raise UserError("embed_positions was called outside its stack: call the stack itself")
        vectors = self.encodings.as_list()[0].embed(states[0].positions)  # equal in all states
        assert vectors is not None, "an input encoding adds vectors"
        return vectors.type_as(self.dtype_marker)


class _PositionalStack(nn.Module):
    """Base of encoder and decoder: builds encodings, and computes the position state."""

    layers: nn.ModuleList
    embed_positions: nn.Module | None
    padding_idx: int
    layers_built = 0  # so far; fairseq's constructor builds them in order

    def install(self, cfg: Any, options: Any, dictionary: Any) -> None:
        """Build the encodings of the input, and those that the layers share; refuse misfits.

        ``cfg`` is that of the stack, ``options`` its ``encoder`` or ``decoder``.
        """
        self.settings: StackSettings = cfg.position
        self.weight_settings = read_weight_settings(cfg, options, dictionary)
        # Loading a checkpoint reads both, in `checkpoints.state_dict_adapter`.
        self.layers_kept = self.settings.layers_kept
        self.init_positions = self.settings.init_positions
        spec, dims = self.settings.spec, self.settings.dims
        self.spec, self.dims = spec, dims
        self.id_readers = assembly.find_id_readers(spec, dims)  # encodings that read positions
        self.eos_idx = dictionary.eos()
        at_input = assembly.build_input(spec, dims)
        self.embed_positions = None if at_input is None else InputPositions(at_input)
        self.encodings = assembly.build_shared(spec, dims)  # those that layers share
        # What each kind of layer adds to the scores, without values; refused if it cannot work.
        terms_by_kind = assembly.draft_terms(spec, dims, self.settings.backend)
        self.has_reset = any(terms.has(Reset) for terms in terms_by_kind)  # rows for first tokens

    def _next_index(self) -> int:
        """Count the layer that fairseq is about to build, as it does not pass the layer's index."""
        self.layers_built += 1
        return self.layers_built - 1

    def describe(self) -> str:
        """Describe positions, directions and backend, for the log."""
        runs = [f"{name} x{len(list(run))}" for name, run in groupby(self.settings.directions)]
        named = self.named_parameters("model")  # a prefix: the check expects names in a model
        count = sum(x.numel() for name, x in named if is_position_parameter(name))
        return (
            f"{self.spec} | directions: {' '.join(runs)} | backend: {self.settings.backend} | "
            f"position parameters: {count:,}"
        )

    def record(self, **settings: Any) -> None:
        """Record fields of ``WeightSettings`` that only the model knows, for checkpoints."""
        self.weight_settings = self.weight_settings._replace(**settings)

    @property
    def identity(self) -> Identity:
        """Positions and settings that the weights of this stack belong to."""
        directions = () if self.dims.causal else self.settings.directions  # in a decoder always lr
        length, settings = self.dims.trained_length, self.weight_settings
        return Identity(self.spec, format_directions(directions), length, settings)

    def get_extra_state(self) -> Tensor:
        """Encode the identity, which torch stores in the state dict with the parameters."""
        return self.identity.to_tensor()

    def set_extra_state(self, state: Tensor) -> None:
        """Adopt the length of loaded weights, and their settings that this model does not know."""
        loaded = Identity.from_tensor(state)  # compared before, in `checkpoints.state_dict_adapter`
        self.weight_settings = self.weight_settings.fill_unknown_from(loaded.weight_settings)
        self.dims = self.dims._replace(pretrained_length=loaded.trained_length)
        for module in self.modules():
            if isinstance(module, Encoding):
                module.set_dims(module.dims._replace(pretrained_length=loaded.trained_length))

    def at_positions(self, tokens: Tensor, ids: Tensor | None) -> AbstractContextManager[None]:
        """Run the forward passes in a ``with`` block at a caller's positions.

        Args:
            tokens: the tokens, ``(B, S)``, whose padding and ends of sentences are read.
            ids: position ids, ``(B or 1, S)`` or ``(axes, B or 1, S)``; by default tokens are
                counted.

        Raises:
            UserError: the ids have another shape, or an encoding cannot take them.
        """
        batch, length = tokens.shape
        if ids is not None:  # checked; axes are then the last dimension
            ids = read_position_ids("position_ids", ids, self.id_readers, batch, (length,))
        return set_context(self.compute_states(tokens, ids=ids))

    def compute_states(
        self, tokens: Tensor, decoding: bool = False, ids: Tensor | None = None
    ) -> tuple[Shared, ...]:
        """Compute the position states of a forward pass, one for each kind of layer.

        Args:
            tokens: ``(B, S)``, the whole prefix when decoding.
            decoding: whether this is a step of decoding; the last token is then the query.
            ids: position ids, ``(B or 1, S)`` or ``(B or 1, S, axes)``; by default tokens are
                counted.
        """
        tgt_len = 1 if decoding else tokens.size(1)
        positions = Positions.from_tokens(tokens, self.padding_idx, self.eos_idx, tgt_len)
        positions = self.encodings.number(positions)  # with `documents`, from 0 in each
        if ids is not None:
            positions = positions.replace_ids(ids)  # where documents begin stays the same
        if self.has_reset:  # one tensor for all layers, as `Mask.cached` compares by identity
            positions = positions._replace(first=positions.is_first())
        built = self.settings.spec, self.settings.dims  # layers refuse states of another stack
        return tuple(x._replace(stack=built) for x in compute_shared(self.encodings, positions))


class PositionalEncoder(_PositionalStack, TransformerEncoderBase):
    """fairseq's encoder with chosen position encodings; for ``cfg`` see ``configure_stack``."""

    def __init__(self, cfg: Any, dictionary: Any, embed_tokens: nn.Embedding) -> None:
        super().__init__(cfg, dictionary, embed_tokens)
        self.install(cfg, cfg.encoder, dictionary)

    def build_encoder_layer(self, cfg: Any) -> nn.Module:
        """Build a layer, wrapped as fairseq does."""
        return wrap_layer(PositionalEncoderLayer(cfg, self._next_index()), cfg)

    def forward(self, src_tokens: Tensor, *args: Any, **kwargs: Any) -> dict[str, list[Tensor]]:
        """Encode ``src_tokens``, ``(B, S)``; arguments and result are fairseq's."""
        # `at_positions` may have set states: of a caller's ids, or of the text before masking.
        with set_context(current_context() or self.compute_states(src_tokens)):
            return cast("dict[str, list[Tensor]]", super().forward(src_tokens, *args, **kwargs))


class PositionalDecoder(_PositionalStack, TransformerDecoderBase):
    """fairseq's decoder with chosen position encodings; for ``cfg`` see ``configure_stack``."""

    def __init__(
        self, cfg: Any, dictionary: Any, embed_tokens: nn.Embedding, no_encoder_attn: bool = False
    ) -> None:
        super().__init__(cfg, dictionary, embed_tokens, no_encoder_attn)
        self.install(cfg, cfg.decoder, dictionary)

    def build_decoder_layer(self, cfg: Any, no_encoder_attn: bool = False) -> nn.Module:
        """Build a layer, wrapped as fairseq does."""
        index = self._next_index()
        return wrap_layer(PositionalDecoderLayer(cfg, index, no_encoder_attn=no_encoder_attn), cfg)

    def extract_features(
        self,
        prev_output_tokens: Tensor,
        encoder_out: dict[str, list[Tensor]] | None = None,
        incremental_state: dict[str, Any] | None = None,
        full_context_alignment: bool = False,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Any]:
        """Decode ``prev_output_tokens``, ``(B, S)``; arguments and result are fairseq's.

        Raises:
            UserError: ``full_context_alignment`` is True; our decoders are always ``lr``.
        """
        if full_context_alignment:
            raise UserError("leave out full_context_alignment: decoders here see only the past")
        states, decoding = current_context(), incremental_state is not None
        if incremental_state is not None:
            self._refuse_skipped_tokens(prev_output_tokens.size(1), incremental_state)
            if states is not None:
                raise UserError("at_positions: pass all tokens at once, no incremental state")
        if states is None:
            states = self.compute_states(prev_output_tokens, decoding)
        # Later steps of decoding find rotated keys in their caches.
        is_first = not decoding or prev_output_tokens.size(1) == 1
        if is_first and encoder_out is not None and self.spec.rotates_source:
            (padding,) = encoder_out["encoder_padding_mask"]  # [B, S]
            source = Positions.from_padding(padding, tgt_len=0)  # keys alone, no queries
            states = tuple(x._replace(source_rotation=x.rotation_at(source.ids)) for x in states)
        with set_context(states):
            decoded = super().extract_features(
                prev_output_tokens, encoder_out, incremental_state, False, *args, **kwargs
            )
        return cast("tuple[Tensor, Any]", decoded)

    def _refuse_skipped_tokens(self, count: int, incremental_state: dict[str, Any]) -> None:
        """Refuse ``count`` tokens to decode that are not one more than in the last step."""
        layer: Any = self.layers[0]  # only to make a key that no other module uses
        key = layer.self_attn._get_full_incremental_state_key("steps")
        steps = incremental_state.get(key, 0)  # the cache may have fewer keys, with a window
        if count != steps + 1:
            one_by_one = "with an incremental state, decode token by token, from the first"
            raise UserError(f"{count} tokens were given to decode after {steps}: {one_by_one}")
        incremental_state[key] = count

    def buffered_future_mask(self, tensor: Tensor) -> None:
        """Build no mask of pairs for fairseq: the direction of the layers replaces it."""
