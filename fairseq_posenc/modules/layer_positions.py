"""Provides a layer's encodings as rotation and bias, for models that compute attention."""

from torch import Tensor, nn

from fairseq_posenc.assembly import build_layer, draft_terms
from fairseq_posenc.backends.by_distance import sum_biases
from fairseq_posenc.backends.flex.scores import ScoreMod, build_score_mod
from fairseq_posenc.encodings.term import NumbersByDistance, NumbersByPair, Reset, ScaleFactor
from fairseq_posenc.errors import UserError
from fairseq_posenc.modules.attention_core import AttentionCore
from fairseq_posenc.modules.input_checks import select_state
from fairseq_posenc.modules.stack_positions import StackPositions, read_stack
from fairseq_posenc.shared import Shared


class LayerPositions(AttentionCore, nn.Module):
    """The position encodings of one layer, for models that compute attention themselves.

    Rotate queries and keys, then add a bias to the scores, or pass a ``score_mod``:

    >>> import torch
    >>> from torch.nn.functional import scaled_dot_product_attention
    >>> positions = StackPositions("rope+alibi", embed_dim=64, num_heads=4)
    >>> layer = LayerPositions(positions)
    >>> embeddings, shared = positions(torch.randn(2, 5, 64))  # once a forward pass
    >>> query, key, value = torch.randn(3, 2, 4, 5, 16)  # (batch, heads, length, head_dim) each
    >>> query, key = layer.rotate(query, key, shared)
    >>> bias = layer.bias(shared)
    >>> scaled_dot_product_attention(query, key, value, bias, scale=layer.scale).shape
    torch.Size([2, 4, 5, 16])

    Masking is left to you: :meth:`hidden` says which keys a query must not see.

    Args:
        positions: positions of the layer's stack; they do not become a part of this module.
        layer: index of the layer in the stack, from 0; matters if the spec's layers differ.

    Raises:
        UserError: the encodings do more than a rotation and a bias can express.
    """

    def __init__(self, positions: StackPositions, layer: int = 0) -> None:
        super().__init__()
        self.spec, self.dims = spec, dims = read_stack(positions, layer)
        self.kind = spec.layer_kind(layer)  # layers with the same encodings are of one kind
        terms = draft_terms(spec, dims, backend="auto")[self.kind]  # of a single token
        widens = any(item.encoding.widens for item in spec.layer_kinds[self.kind])
        simple = (NumbersByDistance, NumbersByPair, Reset, ScaleFactor)
        if widens or not all(isinstance(term, simple) for term in terms):  # widens queries, keys
            raise UserError(
                f"{spec}: its scores are more than a rotated dot product, a factor and a bias for "
                "each distance: use SelfAttention"
            )
        self.scale = terms.scale(dims.head_dim)
        self.encodings = build_layer(spec, dims, layer)

    def rotate(
        self, query: Tensor, key: Tensor, shared: tuple[Shared, ...]
    ) -> tuple[Tensor, Tensor]:
        """Rotate queries and keys of the new tokens, both ``(batch, heads, tgt_len, head_dim)``.

        Raises:
            UserError: they have another shape.
        """
        state = select_state(shared, self.kind, self.spec, self.dims)
        tgt_len, head_dim = state.positions.tgt_len, self.dims.head_dim
        for name, x in {"query": query, "key": key}.items():
            if x.dim() != 4 or x.shape[2:] != (tgt_len, head_dim):
                raise UserError(
                    f"{name} {tuple(x.shape)} must be (batch, heads, {tgt_len}, {head_dim}), of "
                    "the new tokens"
                )
        if (rotation := self.rotation(state)) is None:
            return query, key
        return rotation.rotate_queries(query), rotation.rotate_keys(key)

    def hidden(self, shared: tuple[Shared, ...], direction: str = "both") -> Tensor | None:
        """Mark the keys that a query must not see, ``(batch or 1, 1, tgt_len or 1, src_len)``.

        ``lr`` also hides later keys, ``rl`` earlier ones; None: no key is hidden.
        """
        state = select_state(shared, self.kind, self.spec, self.dims)
        positions = state.positions
        mask = state.mask.with_direction(direction)
        return mask.forbidden(positions.tgt_len, positions.src_len, positions.device)

    def bias(self, shared: tuple[Shared, ...]) -> Tensor | None:
        """Compute the bias, which is added to the scaled scores before masks and softmax.

        Returns:
            ``(batch or 1, heads or 1, tgt_len, src_len)`` in float32, or None for no bias.

        Raises:
            UserError: the encodings also multiply the scores; use :meth:`score_mod`.
        """
        state = select_state(shared, self.kind, self.spec, self.dims)
        terms = self.collect_terms(state)
        if terms.gain is not None:
            raise UserError("a bias cannot multiply the scores by a factor: use score_mod")
        return sum_biases(terms, state.positions.tgt_len, state.positions.src_len)

    def score_mod(self, shared: tuple[Shared, ...]) -> ScoreMod:
        """Build the function that ``torch.nn.attention.flex_attention`` takes as ``score_mod``.

        Also pass it :attr:`scale`. No matrix of scores is made.
        """
        state = select_state(shared, self.kind, self.spec, self.dims)
        terms, positions = self.collect_terms(state), state.positions
        return build_score_mod(terms, positions.tgt_len, positions.src_len, positions.device)
