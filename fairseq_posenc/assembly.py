"""A spec assembled for a stack of layers: at the input, once for all layers, and in each layer."""

from __future__ import annotations

import os
from typing import NamedTuple

import torch
from torch import Tensor

from fairseq_posenc.backends import check
from fairseq_posenc.backends.base import Mask, Once
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

    def at_input(self) -> Encodings | None:
        """Return new encodings that add vectors to the token embeddings; None where none does."""
        encodings = build(self.spec.at("input"), self.dims)
        token = Positions.of(torch.zeros(1, 1, dtype=torch.long), -1, -1, 1)
        adds = any(encoding.embed(token) is not None for encoding in encodings.each())
        return encodings if adds else None

    def for_stack(self) -> Encodings:
        """Return new encodings that all layers share."""
        return build(self.spec.at("stack"), self.dims)

    def for_layer(self) -> Encodings:
        """Return new encodings of one layer."""
        return build(self.spec.at("layer"), self.dims)

    def trained_at(self, length: int) -> Assembly:
        """Return the assembly for weights that were trained at a length."""
        return self._replace(dims=self.dims._replace(trained_on=length))

    def check(self, backend: str) -> Terms:
        """Refuse encodings that cannot work together, or not on a backend; return their terms.

        Args:
            backend: ``auto``, or one that must be used.

        Returns:
            Those of a single token.

        Raises:
            UserError: says what cannot.
        """
        self.check_size()
        token = Positions.of(torch.zeros(1, 1, dtype=torch.long), -1, -1, 1)
        span = Span.of(1, 1, token.tokens.device)
        with torch.random.fork_rng(devices=[]):  # the model's numbers are drawn after this
            stack, layer = (build(self.spec.at(place), self.dims) for place in ("stack", "layer"))
        terms = stack.terms(span, token) | layer.terms(span, token)
        check(backend, terms.unprojected(self.dims.num_heads), self.dims.head_dim)
        return terms

    def check_size(self, layers: int = 1, least: int = 0) -> None:
        """Refuse tables that this machine's memory cannot hold, before any is made.

        Args:
            layers: of the stack.
            least: numbers that are made whatever the spec.

        Raises:
            UserError: says how large they would be.
        """
        needed = 4 * max(least, sum(self.parameters(layers).values()))
        if not hasattr(os, "sysconf"):  # on Windows nothing is known, and torch will tell
            return
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if needed > memory:
            raise UserError(
                f"{self.dims.max_positions:,} positions would take {needed / 1e9:,.0f} GB, and "
                f"this machine has {memory / 1e9:,.0f}: choose fewer (--max-positions, "
                "--max-source-positions, --max-target-positions, --tokens-per-sample)"
            )

    def parameters(self, layers: int) -> dict[str, int]:
        """Return the size of every position parameter of a stack by its name in a model.

        ``layers.*`` stands for each of the layers.
        """
        sizes = {}
        for place, prefix, modules in (
            ("input", "embed_positions.", 1),
            ("stack", "", 1),
            ("layer", "layers.*.self_attn.", layers),
        ):
            with torch.device("meta"):  # shapes without memory, however large
                built = build(self.spec.at(place), self.dims)
            for name, parameter in built.named_parameters():
                sizes[f"{prefix}encodings.{name}"] = parameter.numel() * modules
        return sizes


class Shared(NamedTuple):
    """What a forward pass of a stack computes once for all of its layers.

    Attributes:
        positions: of the tokens.
        terms: those that all layers share.
        rotation: of the queries and keys of the last T tokens, or None.
        source: of the source's keys, for rotary encoder-decoder attention.
        span: of the terms, where they have room for later steps of decoding.
        once: what the first layer that needs it makes for all.
    """

    positions: Positions
    terms: Terms = Terms()
    rotation: Rotation | None = None
    source: Rotation | None = None
    span: Span | None = None
    once: Once | None = None

    @classmethod
    def of(cls, encodings: Encodings, positions: Positions) -> Shared:
        """Return what the encodings of a stack give its layers.

        Args:
            encodings: what :meth:`Assembly.for_stack` returned.
            positions: of the tokens.
        """
        tokens = positions.tokens
        span = Span.of(positions.tgt_len, tokens.size(1), tokens.device)
        rotation = encodings.rotation(positions.queries(positions.ids))
        return cls(positions, encodings.terms(span, positions), rotation, once=Once())

    def rotate(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Return query and key of the last T tokens rotated, both ``(B, H, T, D)``."""
        if self.rotation is None:
            return query, key
        return self.rotation.of_queries(query), self.rotation.of_keys(key)

    def mask(self, direction: str) -> Mask:
        """Return which keys a query may see, by a direction and the padding among the tokens."""
        positions = self.positions
        mask = Mask(direction, once=self.once)
        padding = mask.made("padding", (positions.tokens,), lambda: positions.padding)
        return mask._replace(key_padding=padding)
