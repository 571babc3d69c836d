"""Provides a layer's encodings to other attention modules, to inspection and to tests."""

import torch
from torch import Tensor

from fairseq_posenc import backends
from fairseq_posenc.assembly import build_layer, draft_layer
from fairseq_posenc.backends import reference
from fairseq_posenc.backends.base import AttentionCall
from fairseq_posenc.backends.by_distance import sum_biases
from fairseq_posenc.backends.flex.scores import ScoreMod, build_score_mod
from fairseq_posenc.encodings.term import NumbersByDistance, NumbersByPair, Reset, ScaleFactor
from fairseq_posenc.errors import UserError
from fairseq_posenc.modules.attention_core import AttentionCore
from fairseq_posenc.modules.input_checks import check_count, read_mask
from fairseq_posenc.modules.stack_positions import StackLayer, StackPositions
from fairseq_posenc.positions import Positions
from fairseq_posenc.shared import Shared, compute_shared


class LayerPositions(StackLayer):
    """The position encodings of one layer, for models that compute attention themselves.

    Rotate queries and keys, then add a bias to the scores, or pass a ``score_mod``:

    >>> import torch
    >>> from torch.nn.functional import scaled_dot_product_attention
    >>> positions = StackPositions("rope+alibi", embed_dim=64, num_heads=4)
    >>> layer = LayerPositions(positions)
    >>> embeddings, shared = positions(torch.randn(2, 5, 64))  # once per forward pass
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
        super().__init__(positions, layer)
        spec, dims = self.spec, self.dims
        terms = draft_layer(spec, dims, kind=self.kind)  # for one token, with the types of a pass
        # Queries and keys that a rotation makes wider (`pope`) would need another scale.
        widens = any(item.encoding.widens for item in spec.layer_kinds[self.kind])
        # With a reset, the first token's pairs have other numbers: still a factor or a bias.
        simple = (NumbersByDistance, NumbersByPair, Reset, ScaleFactor)
        if widens or not all(isinstance(term, simple) for term in terms):
            raise UserError(
                f"{spec}: its scores are more than a rotated dot product, a factor and a bias: "
                "use SelfAttention"
            )
        self.scale = terms.scale(dims.head_dim)
        self.encodings = build_layer(spec, dims, index=layer)

    def rotate(
        self, query: Tensor, key: Tensor, shared: tuple[Shared, ...]
    ) -> tuple[Tensor, Tensor]:
        """Rotate queries and keys of the new tokens, both ``(batch, heads, tgt_len, head_dim)``.

        Raises:
            UserError: they have another shape.
        """
        state = self.select_state(shared)
        tgt_len, head_dim = state.positions.tgt_len, self.head_dim
        for name, x in {"query": query, "key": key}.items():
            if x.dim() != 4 or x.shape[2:] != (tgt_len, head_dim):
                raise UserError(
                    f"{name} {tuple(x.shape)} must be (batch, heads, {tgt_len}, {head_dim}), of "
                    "the new tokens"
                )
        return self.rotate_tokens(query, key, state)

    def hidden(self, shared: tuple[Shared, ...], direction: str = "both") -> Tensor | None:
        """Mark the keys that a query must not see, ``(batch or 1, 1, tgt_len or 1, src_len)``.

        ``lr`` also hides later keys, ``rl`` earlier ones; None: no key is hidden.
        """
        state = self.select_state(shared)
        positions, mask = state.positions, state.mask.with_direction(direction)
        return mask.forbidden(positions.tgt_len, positions.src_len, positions.device)

    def bias(self, shared: tuple[Shared, ...]) -> Tensor | None:
        """Compute the bias, which is added to the scaled scores before masks and softmax.

        Returns:
            ``(batch or 1, heads or 1, tgt_len, src_len)`` in float32, or None for no bias.

        Raises:
            UserError: the encodings also multiply the scores; use :meth:`score_mod`.
        """
        state = self.select_state(shared)
        terms = self.collect_terms(state)
        if terms.gain is not None:  # numbers by distance that multiply, as those of `m1`
            raise UserError("a bias cannot multiply the scores by a factor: use score_mod")
        return sum_biases(terms, state.positions.tgt_len, state.positions.src_len)

    def score_mod(self, shared: tuple[Shared, ...]) -> ScoreMod:
        """Build the function that ``torch.nn.attention.flex_attention`` takes as ``score_mod``.

        Also pass it :attr:`scale`. No matrix of scores is made.
        """
        state = self.select_state(shared)
        terms, positions = self.collect_terms(state), state.positions
        return build_score_mod(terms, positions.tgt_len, positions.src_len, positions.device)


class PositionEncoding(AttentionCore, StackPositions):
    """The position encoding of one layer and of its input, to inspect, test or compare it.

    It has no projections: callers pass queries, keys and values, ``(batch, heads, length,
    head_dim)``. Arguments and errors are those of :class:`StackPositions`.
    """

    def __init__(
        self,
        spec: str,
        embed_dim: int,
        num_heads: int,
        max_positions: int = 512,
        causal: bool = False,
        head_dim: int | None = None,
    ) -> None:
        super().__init__(spec, embed_dim, num_heads, max_positions, causal, head_dim)
        self.spec.check_length(1)  # one layer, not a list of different ones
        self.head_dim = self.dims.head_dim
        self.direction = "lr" if self.dims.causal else "both"
        self.encodings = build_layer(self.spec, self.dims)  # all but the shared ones

    def parameter_counts(self) -> dict[str, int]:
        """Count the elements of each parameter, named by its path: input, shared or encodings."""
        return {name: parameter.numel() for name, parameter in self.named_parameters()}

    def scores(
        self,
        query: Tensor,
        key: Tensor,
        key_padding_mask: Tensor | None = None,
        inputs: Tensor | None = None,
    ) -> Tensor:
        """Compute the scores before masks and softmax; ``ssmax`` and ``cope`` count visible keys.

        Args:
            query: projected queries of the last tokens, unscaled, ``(batch, heads, tgt_len,
                head_dim)``.
            key: projected keys of all tokens, ``(batch, heads, src_len, head_dim)``.
            key_padding_mask: True for padding, ``(batch, src_len)``; it is not visible.
            inputs: the layer's input, ``(batch, src_len, embed_dim)``, which forget gates read; by
                default zeros, so that a gate depends on its bias alone.

        Returns:
            ``(batch, heads, tgt_len, src_len)``, in float32 at least.
        """
        call = self._build_call(query, key, key, key_padding_mask, inputs)  # values are not read
        mask = call.mask.with_direction(self.direction)  # says which keys are visible
        return reference.scores(call.query, call.key, call.terms, mask)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        direction: str | None = None,
        dropout: float = 0.0,
        backend: str = "auto",
        inputs: Tensor | None = None,
    ) -> Tensor:
        """Compute the attended values ``(batch, heads, tgt_len, head_dim)``; see :meth:`scores`.

        Args:
            query: as for :meth:`scores`.
            key: as for :meth:`scores`.
            value: projected values of all tokens, as ``key``, but of any width.
            key_padding_mask: as for :meth:`scores`.
            direction: ``both``, ``lr`` (a query sees no later key) or ``rl`` (no earlier one); by
                default ``lr`` in a causal layer, else ``both``.
            dropout: probability of dropping a weight.
            backend: ``auto``, or the name of a backend.
            inputs: as for :meth:`scores`.
        """
        draft_layer(self.spec, self.dims, kind=0, backend=backend)  # refuses what it cannot compute
        call = self._build_call(query, key, value, key_padding_mask, inputs)
        adds_rows = call.terms.rows("value") is not None  # to the values; rows are as wide as keys
        if value.shape != (size := (*key.shape[:3], (key if adds_rows else value).size(-1))):
            raise UserError(f"value {tuple(value.shape)} must be {size} for key {tuple(key.shape)}")
        mask = call.mask.with_direction(direction or self.direction)
        return backends.attend(call._replace(mask=mask, dropout=dropout), backend)[0]

    @torch.no_grad()
    def distance_curve(self, reach: int, samples: int = 64, seed: int = 0) -> Tensor:
        """Compute the mean score by distance of a query and a key with the same content.

        Both are made from one random vector, to which the input encoding is added first.

        Args:
            reach: the largest distance.
            samples: number of random vectors to average over, from a standard normal distribution.
            seed: random seed of the vectors.

        Returns:
            ``(heads, 2 * reach + 1)`` for distances ``-reach .. reach``.
        """
        check_count("reach", reach, least=0)
        length = 2 * reach + 1
        generator = torch.Generator().manual_seed(seed)  # on the CPU: devices get the same vectors
        content = torch.randn(samples, 1, self.dims.embed_dim, generator=generator)
        content = content.to(next(self.parameters(), content).device)  # stays if there are none
        embedded, _ = self(content.expand(-1, length, -1))  # [samples, length, embed_dim]
        heads = self.split_heads(embedded)  # [samples, H, length, D]
        scores = self.scores(heads, heads, inputs=embedded)  # [samples, H, length, length]
        return scores[:, :, reach].mean(0)  # of the middle query, which has all distances

    def split_heads(self, x: Tensor) -> Tensor:
        """Override a layer's split: nothing projects these vectors, so their width must fit."""
        if x.size(-1) != self.dims.all_heads_dim:
            raise UserError(
                f"vectors of width {x.size(-1)} do not fit {self.dims.num_heads} heads of width "
                f"{self.head_dim} without a layer's projections: use a SelfAttention"
            )
        return super().split_heads(x)

    def _project_rows(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Split rows ``(R, C)``, instead of projecting them, to queries and keys ``(H, R, D)``."""
        (heads,) = self.split_heads(rows[None])
        return heads, heads

    def _build_call(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, inputs: Tensor | None
    ) -> AttentionCall:
        """Check the arguments (``mask``: of padding); the call's own mask has no direction yet."""
        dims = self.dims
        sizes = (*query.shape[:1], dims.num_heads, dims.head_dim)  # all but the length
        fits = all((*x.shape[:2], *x.shape[3:]) == sizes for x in (query, key))
        if not fits or query.size(2) > key.size(2):
            raise UserError(
                f"query {tuple(query.shape)} and key {tuple(key.shape)} must both be (batch, "
                f"{dims.num_heads} heads, length, {dims.head_dim}), the queries of the last tokens"
            )
        batch, _, src_len, _ = key.shape
        padding = read_mask("key_padding_mask", mask, batch, src_len, query.device)
        positions = Positions.from_padding(padding, query.size(2))
        self._refuse_inner_padding(positions, "key_padding_mask")  # that distances would count
        shape = (batch, src_len, dims.embed_dim)
        inputs = query.new_zeros(shape) if inputs is None else inputs
        if inputs.shape != shape:
            raise UserError(f"inputs {tuple(inputs.shape)} must be {shape}")
        (state,) = compute_shared(self.shared, positions)  # layers are of one kind
        terms = self.compute_terms(state) | self.encodings.input_terms(inputs, positions)
        query, key = self.rotate_tokens(query, key, state)
        return AttentionCall(query, key, value, terms, state.mask)
