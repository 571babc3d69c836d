"""Provides a layer's encodings as rotation and bias, for models that compute attention."""

from torch import Tensor, nn

from fairseq_posenc.backends.by_distance import expand_by_distance
from fairseq_posenc.backends.flex.scores import ScoreMod, build_score_mod
from fairseq_posenc.encodings.precision import at_least_fp32
from fairseq_posenc.encodings.term import NumbersByDistance, NumbersByPair, Reset, ScaleFactor
from fairseq_posenc.encodings.terms import Terms
from fairseq_posenc.errors import UserError
from fairseq_posenc.modules.input_checks import check_shared
from fairseq_posenc.modules.stack_positions import StackPositions, read_assembly
from fairseq_posenc.shared import Shared


class LayerPositions(nn.Module):
    """The position encodings of one layer, for models that compute attention themselves.

    Rotate queries and keys, then add a bias to the scores, or pass a ``score_mod``:

    >>> import torch
    >>> from torch.nn.functional import scaled_dot_product_attention
    >>> positions = StackPositions("rope+alibi", embed_dim=64, num_heads=4)
    >>> layer = LayerPositions(positions)
    >>> embeddings, shared = positions(torch.randn(2, 5, 64))  # once a forward pass
    >>> query, key, value = torch.randn(3, 2, 4, 5, 16)  # (batch, heads, length, head_dim) each
    >>> query, key = shared.rotate(query, key)
    >>> bias = layer.bias(shared)
    >>> scaled_dot_product_attention(query, key, value, bias, scale=layer.scale).shape
    torch.Size([2, 4, 5, 16])

    Masking is left to you: ``shared.mask("lr").forbidden(tgt_len, src_len, device)`` is True
    where a causal query must not see a key, padding included.

    Args:
        positions: positions of the layer's stack; they do not become a part of this module.
        layer: index of the layer in the stack, from 0; matters if the spec's layers differ.

    Raises:
        UserError: the encodings do more than a rotation and a bias can express.
    """

    def __init__(self, positions: StackPositions, layer: int = 0) -> None:
        super().__init__()
        self.assembly = read_assembly(positions, layer)
        spec = self.assembly.spec
        self.kind = spec.layer_kind(layer)  # layers with the same encodings are of one kind
        terms = self.assembly.draft_terms(backend="auto")[self.kind]  # of a single token
        widens = any(item.encoding.widens for item in spec.layer_kinds[self.kind])
        simple = (NumbersByDistance, NumbersByPair, Reset, ScaleFactor)
        if widens or not all(isinstance(term, simple) for term in terms):  # widens: query and key
            raise UserError(
                f"{spec}: its scores are more than a rotated dot product, a factor and a bias for "
                "each distance: use SelfAttention"
            )
        self.scale = terms.scale(self.assembly.dims.head_dim)
        self.encodings = self.assembly.build_layer(layer)

    def bias(self, shared: Shared) -> Tensor | None:
        """Compute the bias, which is added to the scaled scores before masks and softmax.

        Args:
            shared: second result of the stack's positions in this forward pass.

        Returns:
            ``(batch or 1, heads or 1, tgt_len, src_len)`` in float32, or None for no bias.

        Raises:
            UserError: the encodings also multiply the scores; use :meth:`score_mod`.
        """
        terms = self._compute_terms(shared).expanded()  # a bias by ids becomes numbers by pair
        if terms.gain is not None:
            raise UserError("a bias cannot multiply the scores by a factor: use score_mod")
        numbers, bias = terms.find(NumbersByPair), terms.bias
        by_pair = None if numbers is None else at_least_fp32(numbers.numbers)
        if bias is None:
            return by_pair
        tgt_len, src_len = shared.positions.tgt_len, shared.positions.src_len
        table = at_least_fp32(bias.table)
        by_distance = expand_by_distance(table, tgt_len, src_len, terms.first)
        return by_distance if by_pair is None else by_distance + by_pair

    def score_mod(self, shared: Shared) -> ScoreMod:
        """Build the function that ``torch.nn.attention.flex_attention`` takes as ``score_mod``.

        Also pass it :attr:`scale`. No matrix of scores is made.

        Args:
            shared: second result of the stack's positions in this forward pass.
        """
        terms = self._compute_terms(shared)
        positions = shared.positions
        return build_score_mod(terms, positions.tgt_len, positions.src_len, positions.device)

    def _compute_terms(self, shared: Shared) -> Terms:
        check_shared(shared, self.assembly)
        positions = shared.positions
        terms = self.encodings.terms(positions.span(), positions)
        return shared.of_kind(self.kind).layer_terms() | terms
