"""Computes the positions of a stack of layers: input vectors, and the state that layers share.

B batch, T new tokens, S all tokens.
"""

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairseq_posenc import assembly
from fairseq_posenc.encodings.base import Dims
from fairseq_posenc.encodings.term import ByDistance
from fairseq_posenc.errors import UserError
from fairseq_posenc.modules import input_checks
from fairseq_posenc.modules.attention_core import AttentionCore, Cache
from fairseq_posenc.positions import Positions, find_changes, reading_waits
from fairseq_posenc.shared import Shared, compute_shared
from fairseq_posenc.specs import Spec, parse


class StackPositions(nn.Module):
    """The positions of a stack of layers: adds input vectors, and computes what its layers share.

    Args:
        spec: names of encodings joined by +, such as ``learned+m4m(max_distance=128)``; for layers
            that differ, joined by commas, such as ``3*rope,none``.
        embed_dim: width of the model.
        num_heads: number of attention heads.
        max_positions: length of the longest sequence, for which trained tables have rows.
        causal: True for a decoder, whose queries see no later keys.
        head_dim: width of a head; by default ``embed_dim / num_heads``.
        pretrained_length: length that loaded weights were trained at; scalings, temperatures and
            logarithmic buckets are made for it; by default ``max_positions``.

    Raises:
        UserError: the spec is wrong (:func:`~fairseq_posenc.specs.parse`), or the sizes do not fit.
    """

    def __init__(
        self,
        spec: str | Spec,
        embed_dim: int,
        num_heads: int,
        max_positions: int = 512,
        causal: bool = False,
        head_dim: int | None = None,
        pretrained_length: int | None = None,
    ) -> None:
        super().__init__()
        spec = parse(spec) if isinstance(spec, str) else spec
        dims = Dims(embed_dim, num_heads, max_positions, causal, pretrained_length, head_dim)
        self.spec, self.dims = spec, dims  # layers refuse states of a stack with others
        limits = assembly.list_limits(spec, dims, spec.items)  # on visible keys
        self.id_readers = assembly.find_id_readers(spec, dims)  # encodings that ids must fit
        # Windows and tables by distance count all places between two tokens, padding included.
        self.has_window = any(limit.window is not None for limit in limits)
        terms_by_kind = assembly.draft_terms(spec, dims, backend="auto")  # for one token
        self.has_tables = any(terms.has(ByDistance) for terms in terms_by_kind)
        # Earlier tokens' ids are also read by masks of chunks or of the first positions, and by
        # scores; not by rotations: cached keys are rotated.
        masks_read_ids = any(x.segments is not None or x.first_keys is not None for x in limits)
        readers = self.id_readers.values()
        read_earlier = any(x.acts_on == "scores" or x.counts_in_sentences for x in readers)
        self.reads_all_ids = masks_read_ids or read_earlier
        # Encodings, under names that state dicts have; what they compute in a pass is in `Shared`.
        self.input = assembly.build_input(spec, dims)
        self.shared = assembly.build_shared(spec, dims)

    def forward(
        self,
        embeddings: Tensor,
        key_padding_mask: Tensor | None = None,
        past: int | Cache = 0,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        ends: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Shared, ...]]:
        """Add the input encoding to embeddings, and compute the state that layers are called with.

        Args:
            embeddings: token embeddings, ``(batch, tgt_len, embed_dim)``.
            key_padding_mask: True for padding, on either side, ``(batch, past + tgt_len)``; it
                never shifts a position.
            past: number of earlier tokens, whose keys and values are in the caches; or the cache
                of a layer, which also knows their ``position_ids``.
            position_ids: positions of these tokens, ``(batch or 1, tgt_len)``, or of all tokens,
                ``(batch or 1, past + tgt_len)``, which encodings of the scores need; by default
                tokens are counted from 0. The distance of a key is its position minus that of the
                query. Directions and windows follow the order of the tokens. Real numbers are
                rounded to float32. On several axes ``(axes, batch or 1, ...)``.
            document_ids: for a spec with ``documents``, the number of each token's document,
                ``(batch, past + tgt_len)``; by default documents end where ``ends`` says.
            ends: True for tokens that end a sentence, as ``</s>``, ``(batch, past + tgt_len)``;
                read by ``documents`` and encodings that count in sentences.

        Returns:
            The embeddings with the input encoding, and the position state of each kind of layer.

        Raises:
            UserError: a shape or a type is wrong; an encoding cannot take the ``position_ids``;
                ``documents`` gets neither ``document_ids`` nor ``ends``; or a spec without it gets
                ``document_ids``.
        """
        past_ids = past.ids if isinstance(past, Cache) else None
        past = past.tokens if isinstance(past, Cache) else past
        input_checks.check_embeddings("embeddings", embeddings, self.dims.embed_dim)
        input_checks.check_count("past", past, least=0)
        batch, tgt_len = embeddings.shape[:2]
        shape, device = (batch, past + tgt_len), embeddings.device
        padding = input_checks.read_mask("key_padding_mask", key_padding_mask, *shape, device)
        positions = Positions.from_padding(padding, tgt_len)
        if ends is not None:
            input_checks.check_each_token("ends", ends, *shape)
            positions = positions._replace(ends=ends.bool() & positions.real())
        # Documents are found by the counted positions, so before a caller's ids replace these.
        positions = self._restart(positions, document_ids, has_ends=ends is not None)
        if position_ids is not None:
            positions = self._replace_ids(positions, position_ids, past_ids)
        self._refuse_inner_padding(positions, "key_padding_mask")
        states = compute_shared(self.shared, positions)  # one for each kind of layer
        for encoding in self.input.as_list() if self.input is not None else ():
            vectors = encoding.embed(states[0].positions)  # equal for all kinds of layers
            assert vectors is not None, "encodings of the input have some"
            embeddings = embeddings + vectors.type_as(embeddings)
        return embeddings, tuple(x._replace(stack=(self.spec, self.dims)) for x in states)

    def _refuse_inner_padding(self, positions: Positions, mask_name: str) -> None:
        """Refuse padding between tokens of a row, or of a document, if distances include it."""
        # Tables use distances between places if ids are consecutive, else between ids.
        counts_places = self.has_window or (self.has_tables and positions.consecutive)
        may_read = not (torch.compiler.is_compiling() or reading_waits(positions.device))
        if positions.padding is None or not counts_places or not may_read:
            return  # a graph cannot read values, and each pass would wait for a GPU once more
        # Tokens after padding or at index 0, which may only be the first of a row or document.
        begins = F.pad(positions.real().long(), (1, 0)).diff(dim=1).eq(1)  # [B, S]
        if bool((begins & ~positions.is_first()).any()):
            raise UserError(
                f"{mask_name}: padding lies between tokens, and {self.spec} would "
                "count it as distance; pad on the left or on the right of all tokens"
            )

    def _restart(self, positions: Positions, ids: Tensor | None, has_ends: bool) -> Positions:
        """Restart positions in documents: where their ids change, or by the ends of sentences."""
        packed = "documents" in self.spec.names
        if ids is None:
            if packed and not has_ends:
                raise UserError("documents: give document_ids, the number of each token's document")
            # `documents` reads the ends; `compute_shared` calls it again, which changes nothing.
            return self.shared.number(positions) if packed else positions
        if not packed:
            raise UserError(f"document_ids: the spec {self.spec} must have +documents")
        input_checks.check_each_token("document_ids", ids, positions.batch_size, positions.src_len)
        input_checks.check_integers("document_ids", ids)
        return positions.begin_documents(find_changes(ids))

    def _replace_ids(self, positions: Positions, ids: Tensor, past_ids: Tensor | None) -> Positions:
        """Replace the position of each token by a caller's ids; a cache may have ``past_ids``."""
        batch, src_len, tgt_len = positions.batch_size, positions.src_len, positions.tgt_len
        lengths = (tgt_len,) if tgt_len == src_len else (tgt_len, src_len)  # new tokens, or all
        ids = input_checks.read_position_ids("position_ids", ids, self.id_readers, batch, lengths)
        # [B or 1, T or S], on several axes [B or 1, T or S, axes]; past_ids [B, S - T (, axes)]
        if past_ids is not None and ids.size(1) < src_len:
            if (n := past_ids.size(0)) != batch:
                raise UserError(f"the cache has a batch size of {n}, and the embeddings {batch}")
            if past_ids.dim() < ids.dim():  # a single id holds for all axes
                past_ids = past_ids[..., None].expand(-1, -1, ids.size(2))
            elif ids.dim() < past_ids.dim():
                ids = ids[..., None].expand(-1, -1, past_ids.size(2))
            ids = torch.cat([past_ids, ids.expand(batch, *ids.shape[1:])], 1)
        if ids.size(1) < src_len and self.reads_all_ids:
            raise UserError(
                f"position_ids {tuple(ids.shape)}: {self.spec} also needs those of the "
                f"earlier tokens, ({batch} or 1, {src_len}); or pass a layer's cache as past"
            )
        # No encoding reads the ids of earlier tokens here, so these may be zeros.
        missing = ids.new_zeros(ids.size(0), src_len - ids.size(1), *ids.shape[2:])
        return positions.replace_ids(torch.cat([missing, ids], 1))


class StackLayer(AttentionCore, nn.Module):
    """Base of the modules of a layer, which keep the spec and the sizes of its stack.

    Raises:
        UserError: ``positions`` is something else, or ``layer`` is not a number of at least 0.
    """

    def __init__(self, positions: StackPositions, layer: int) -> None:
        super().__init__()
        if not isinstance(positions, StackPositions):
            raise UserError(
                f"positions must be a StackPositions, not {type(positions).__name__}: build one of "
                "the spec, and pass it to all layers"
            )
        input_checks.check_count("layer", layer, least=0)
        self.spec, self.dims = positions.spec, positions.dims
        self.head_dim = self.dims.head_dim  # for `AttentionCore`
        self.kind = self.spec.layer_kind(layer)  # an index in `shared`; equal layers share it

    def select_state(self, shared: object) -> Shared:
        """Select the state of this kind of layer; refuse one that another stack computed."""
        if not (isinstance(shared, tuple) and shared and isinstance(shared[0], Shared)):
            raise UserError(
                f"`shared` must be the second result of the stack's positions, not "
                f"{type(shared).__name__}: x, shared = positions(embeddings), then layer(x, shared)"
            )
        if shared[0].stack != (self.spec, self.dims):
            raise UserError(
                "`shared` was computed by the positions of another stack: pass each layer the "
                "result of its own StackPositions"
            )
        return cast("Shared", shared[self.kind])
