"""A spec assembled for a stack of layers: at the input, once for all layers, and in each layer."""

from __future__ import annotations

import os
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from fairseq_posenc.backends import check
from fairseq_posenc.backends.base import Mask, PerForwardCache
from fairseq_posenc.encodings.base import Dims, Encodings
from fairseq_posenc.encodings.rotation import Rotation
from fairseq_posenc.encodings.terms import Terms
from fairseq_posenc.errors import UserError
from fairseq_posenc.positions import Positions, Span
from fairseq_posenc.registry import Spec, build


class Assembly(NamedTuple):
    """The encodings of a spec, for a stack of given sizes.

    Attributes:
        spec: which encodings.
        dims: the sizes.
    """

    spec: Spec
    dims: Dims

    def build_input(self) -> Encodings | None:
        """Build the encodings that add vectors to the token embeddings; None where none does."""
        token = _one_token()
        drafts = _draft(self, "input").each()
        adds = any(encoding.embed(token) is not None for encoding in drafts)
        return build(self.spec.select("input"), self.dims) if adds else None

    def build_stack(self) -> Encodings:
        """Build the encodings that all layers share."""
        return build(self.spec.select("stack"), self.dims)

    def build_layer(self) -> Encodings:
        """Build the encodings of one layer."""
        return build(self.spec.select("layer"), self.dims)

    def trained_at(self, length: int) -> Assembly:
        """Describe the same stack with weights that were trained at a length."""
        return self._replace(dims=self.dims._replace(trained_on=length))

    def check(self, backend: str) -> Terms:
        """Refuse encodings that cannot work together, or not on a backend; return their terms.

        Args:
            backend: ``auto``, or one that must be used.

        Returns:
            The terms of a single token, without values (on the device "meta").

        Raises:
            UserError: names them.
        """
        self.check_size()
        token = _one_token()
        span = Span.from_lengths(1, 1, token.tokens.device)
        terms = _draft(self, "stack").terms(span, token) | _draft(self, "layer").terms(span, token)
        check(backend, terms.unprojected(self.dims.num_heads), self.dims.head_dim)
        return terms

    def check_size(self, layers: int = 1, least: int = 0) -> None:
        """Refuse tables that this machine's memory cannot hold, before any is made.

        Args:
            layers: of the stack.
            least: numbers that are made whatever the spec.

        Raises:
            UserError: states their size.
        """
        needed = 4 * max(least, sum(self.parameters(layers).values()))
        if not hasattr(os, "sysconf"):  # on Windows nothing is known, and torch itself fails
            return
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if needed > memory:
            raise UserError(
                f"{self.dims.max_positions:,} positions would take {needed / 1e9:,.0f} GB, and "
                f"this machine has {memory / 1e9:,.0f}: choose fewer (max_positions, "
                "max_source_positions, max_target_positions, tokens_per_sample)"
            )

    def parameters(self, layers: int) -> dict[str, int]:
        """Count the numbers of every position parameter of a stack by its name in a model.

        ``layers.*`` stands for each of the layers.
        """
        sizes = {}
        for place, prefix, modules in (
            ("input", "embed_positions.", 1),
            ("stack", "", 1),
            ("layer", "layers.*.self_attn.", layers),
        ):
            for name, parameter in _draft(self, place).named_parameters():
                sizes[f"{prefix}encodings.{name}"] = parameter.numel() * modules
        return sizes


@cache
def _draft(assembly: Assembly, place: str) -> Encodings:
    """Build the encodings of a place once, for questions: shapes without memory or values."""
    with torch.device("meta"):
        return build(assembly.spec.select(place), assembly.dims)


def _one_token() -> Positions:
    """Make the positions of a single token, without values."""
    tokens = torch.zeros(1, 1, dtype=torch.long, device="meta")
    return Positions.from_tokens(
        tokens, padding_idx=-1, eos_idx=-1, tgt_len=1, inspect_padding=False
    )


class Shared(NamedTuple):
    """The position state of a forward pass, computed once for all layers of a stack.

    Attributes:
        positions: of the tokens.
        terms: those that all layers share.
        rotation: of the queries and keys of the last T tokens, or None.
        source: of the source's keys, for rotary encoder-decoder attention.
        span: of the terms, where they have room for later steps of decoding.
        cache: of values that the first layer computes for all.
    """

    positions: Positions
    terms: Terms = Terms()
    rotation: Rotation | None = None
    source: Rotation | None = None
    span: Span | None = None
    cache: PerForwardCache | None = None

    @classmethod
    def compute(cls, encodings: Encodings, positions: Positions) -> Shared:
        """Compute the position state from the encodings of a stack.

        Args:
            encodings: of :meth:`Assembly.build_stack`.
            positions: of the tokens.
        """
        tokens = positions.tokens
        span = Span.from_lengths(positions.tgt_len, tokens.size(1), tokens.device)
        rotation = encodings.rotation(positions.queries(positions.ids))
        return cls(positions, encodings.terms(span, positions), rotation, cache=PerForwardCache())

    def rotate(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate query and key of the last T tokens, both ``(B, H, T, D)``."""
        if self.rotation is None:
            return query, key
        return self.rotation.rotate_queries(query), self.rotation.rotate_keys(key)

    def mask(self, direction: str) -> Mask:
        """Make the mask of a direction and the padding among the tokens."""
        positions = self.positions
        mask = Mask(direction, cache=self.cache)
        padding = mask.cached("padding", (positions.tokens,), lambda: positions.padding)
        return mask._replace(key_padding=padding)
