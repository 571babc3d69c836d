"""Computes the positions of a stack of layers: input vectors, and the state that layers share.

B batch, T new tokens, S all tokens.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairseq_posenc import assembly
from fairseq_posenc.encodings.base import Dims
from fairseq_posenc.encodings.term import ByDistance
from fairseq_posenc.errors import UserError
from fairseq_posenc.modules.cache import Cache
from fairseq_posenc.modules.input_checks import (
    check_embeddings,
    check_integers,
    check_mask,
    check_tensor,
    join_ids,
    read_position_ids,
)
from fairseq_posenc.positions import Positions, may_sync
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
    ) -> None:
        super().__init__()
        spec = parse(spec) if isinstance(spec, str) else spec
        dims = Dims(embed_dim, num_heads, max_positions, causal, own_head_dim=head_dim)
        self.spec, self.dims = spec, dims  # also in each state, for our layers to compare
        limits = assembly.find_limits(spec, dims)  # of visible keys, for one token; None: no limit
        self.id_readers = assembly.find_id_readers(spec, dims)  # encodings that ids must fit
        # Windows and tables by distance count all places between two tokens, padding included.
        self.has_window = limits.window is not None
        drafts = assembly.draft_terms(spec, dims, backend="auto")  # of each kind of layer
        self.has_tables = any(terms.has(ByDistance) for terms in drafts)
        # Whether earlier tokens' positions matter, too: for distances, and for visible keys.
        self.reads_all_ids = (
            limits.segments is not None
            or limits.first_keys is not None
            or any(reader.acts_on == "scores" for reader in self.id_readers.values())
        )
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
        source_length: int | None = None,
        source_padding_mask: Tensor | None = None,
        source_position_ids: Tensor | None = None,
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
                ``(batch, past + tgt_len)``.
            source_length: number of tokens in an encoder's output, for a :class:`CrossAttention`
                that rotates its keys; by default they are counted from 0.
            source_padding_mask: True for padding of the source, ``(batch, source_length)``; needed
                if it is padded on the left, so that padding shifts no position.
            source_position_ids: positions of the source's tokens, ``(batch or 1, source_length)``.
            ends: True for tokens that end a sentence, as ``</s>``, ``(batch, past + tgt_len)``.

        Returns:
            The embeddings with the input encoding, and the position state of each kind of layer.

        Raises:
            UserError: a shape or a type is wrong; an encoding cannot take the ``position_ids``; or
                only one of ``document_ids`` and the encoding ``documents`` is given.
        """
        past_ids = past.ids if isinstance(past, Cache) else None
        past = past.tokens if isinstance(past, Cache) else past
        check_embeddings("embeddings", embeddings, self.dims.embed_dim)
        if isinstance(past, bool) or not isinstance(past, (int, torch.SymInt)) or past < 0:
            raise UserError(
                f"past={past!r}: the number of earlier tokens must be a whole number of at least 0"
            )
        batch, tgt_len = embeddings.shape[:2]
        positions = positions_from_padding(
            batch, past + tgt_len, tgt_len, key_padding_mask, embeddings.device
        )
        if ends is not None:
            positions = positions._replace(ends=ends & positions.real())
        if ends is not None and document_ids is None:  # `documents` restarts at them
            positions = self.shared.number(positions)  # counted ones: ids given never restart
        else:
            positions = self._split_documents(positions, document_ids)
        if position_ids is not None:
            positions = self._replace_ids(positions, position_ids, past_ids)
        elif past_ids is not None:
            raise UserError("the tokens in the cache had position_ids: give those of the new ones")
        if document_ids is None:
            self._refuse_gaps(positions)
        shared = compute_shared(self.shared, positions)
        for encoding in self.input.as_list() if self.input is not None else ():
            vectors = encoding.embed(shared[0].positions)  # equal for all kinds of layers
            assert vectors is not None, "encodings of the input have some"
            embeddings = embeddings + vectors.type_as(embeddings)
        if source_length is not None:
            source = self._number_source(
                batch, source_length, source_padding_mask, source_position_ids, embeddings.device
            )
            shared = tuple(state.with_source(source) for state in shared)
        elif source_position_ids is not None or source_padding_mask is not None:
            name = "padding_mask" if source_position_ids is None else "position_ids"
            raise UserError(f"source_{name}: also give source_length")
        return embeddings, tuple(state._replace(spec=self.spec, dims=self.dims) for state in shared)

    def _refuse_gaps(self, positions: Positions) -> None:
        """Refuse padding between tokens if distances between places include it."""
        # Tables use distances of places if ids are consecutive, otherwise those of the ids.
        counts_places = self.has_window or (self.has_tables and positions.consecutive)
        if not counts_places or not may_sync(positions.device, decoding=True):
            return  # on a GPU, the check would be one more wait in every pass
        # The first token of each run of tokens; a row has several runs if padding lies between.
        begins = F.pad(positions.real().long(), (1, 0)).diff(dim=1).eq(1)  # [B, S]
        if bool((begins.sum(1) > 1).any()):
            raise UserError(
                f"key_padding_mask: padding lies between tokens, and {self.spec} would "
                "count it as distance; pad on the left or on the right of all tokens"
            )

    def _number_source(
        self,
        batch: int,
        length: int,
        padding: Tensor | None,
        ids: Tensor | None,
        device: torch.device,
    ) -> Positions:
        """Number the tokens of a source, ``(batch or 1, length)``, or use a caller's ids."""
        if not isinstance(length, (int, torch.SymInt)) or length < 1:
            raise UserError(f"source_length={length} must be a whole number of at least 1")
        positions = positions_from_padding(
            batch, length, length, padding, device, "source_padding_mask"
        )
        if ids is None:
            return positions
        ids = read_position_ids("source_position_ids", ids, self.id_readers, batch, (length,))
        return positions.replace_ids(ids, "source_position_ids")

    def _split_documents(self, positions: Positions, ids: Tensor | None) -> Positions:
        """Restart positions where the number of the document changes."""
        packed = any(item.name == "documents" for item in self.spec.whole_stack)
        if ids is not None and not packed:
            raise UserError(f"document_ids: the spec {self.spec} must have +documents")
        if ids is None and packed:
            raise UserError("documents: give document_ids, the number of each token's document")
        if ids is None:
            return positions
        check_tensor("document_ids", ids)
        shape = (positions.batch_size, positions.src_len)
        if ids.shape != shape:
            raise UserError(
                f"document_ids {tuple(ids.shape)} must be {shape}: batch, and all tokens, earlier "
                "ones included"
            )
        check_integers("document_ids", ids)
        # The first token begins a document in any case, so it does not matter that 0 precedes it.
        return positions.begin_documents(ids.ne(F.pad(ids, (1, 0))[:, :-1]))

    def _replace_ids(self, positions: Positions, ids: Tensor, past_ids: Tensor | None) -> Positions:
        """Replace the position of each token by a caller's ids."""
        batch, src_len, tgt_len = positions.batch_size, positions.src_len, positions.tgt_len
        lengths = (tgt_len,) if tgt_len == src_len else (tgt_len, src_len)  # of new or all tokens
        ids = read_position_ids("position_ids", ids, self.id_readers, batch, lengths)
        if past_ids is not None and ids.size(1) < src_len:
            if (n := past_ids.size(0)) != batch:
                raise UserError(
                    f"the cache has a batch size of {n}, and the embeddings have {batch}"
                )
            ids = join_ids(past_ids, ids.expand(batch, *ids.shape[1:]))
        if ids.size(1) < src_len and self.reads_all_ids:
            raise UserError(
                f"position_ids {tuple(ids.shape)}: {self.spec} also needs those of the "
                f"earlier tokens, ({batch} or 1, {src_len}); or pass a layer's cache as past"
            )
        # No encoding reads the ids of earlier tokens here, so these may be zeros.
        missing = ids.new_zeros(ids.size(0), src_len - ids.size(1), *ids.shape[2:])
        return positions.replace_ids(torch.cat([missing, ids], 1))


def read_stack(positions: StackPositions, layer: int) -> tuple[Spec, Dims]:
    """Check a layer's arguments ``positions`` and ``layer``; return the stack's spec and sizes.

    Raises:
        UserError: ``positions`` is something else, or ``layer`` is not a number of at least 0.
    """
    if not isinstance(positions, StackPositions):
        raise UserError(
            f"positions must be a StackPositions, not {type(positions).__name__}: build one of the "
            "spec, and pass it to all layers"
        )
    if isinstance(layer, bool) or not isinstance(layer, int) or layer < 0:
        raise UserError(f"layer={layer!r}: layers are numbered 0, 1, 2 and so on")
    return positions.spec, positions.dims


def positions_from_padding(
    batch: int,
    src_len: int,
    tgt_len: int,
    padding: Tensor | None,
    device: torch.device,
    name: str = "key_padding_mask",
) -> Positions:
    """Compute the positions of ``(batch, src_len)`` tokens from their padding mask of this name."""
    check_mask(name, padding, batch, src_len)
    if padding is None:
        padding = torch.zeros(batch, src_len, dtype=torch.bool, device=device)
    return Positions.from_padding(padding.to(device), tgt_len)
