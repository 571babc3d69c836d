"""The contract of a position encoding.

An encoding is a small module with trained parameters. It never computes attention: it declares what
it adds to the scores as data (:mod:`~fairseq_posenc.encodings.term`), which every backend can
compute. In a forward pass, the stack of layers calls ``number`` first, and then the other methods:
once if all layers share the module, else in each layer.

Shape legend, for all docstrings and for comments such as ``# [B, H, T, D]``:
    B batch, T queries, S keys, H heads, D head size, C model size,
    G tables: 1, which all heads share, or H, one for each head,
    R rows of a table, one for each run of distances (:class:`~fairseq_posenc.encodings.runs.Runs`),
    W width of a state, which is a second, narrow projection of a token.
In numbers of parameters, m is the number of layers, h that of heads, n that of positions; h d = C.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import ClassVar, Literal, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairseq_posenc.encodings.rotation import Rotation
from fairseq_posenc.encodings.term import Decay, ScaleFactor, States, Term
from fairseq_posenc.encodings.terms import Terms
from fairseq_posenc.errors import UserError
from fairseq_posenc.mask import NO_MASK, Mask
from fairseq_posenc.positions import Positions
from fairseq_posenc.precision import at_least_fp32, sum_exactly

INIT_STD = 0.02  # the standard deviation of BERT's initial matrices and tables
# Where an encoding acts, in the order of canonical specs ("positions": it numbers the tokens).
Place = Literal["input", "rotation", "scores", "softmax", "mask", "positions"]


class Dims(NamedTuple):
    """The sizes of a stack of layers that an encoding is built for.

    Attributes:
        embed_dim: C.
        num_heads: H.
        max_positions: n, the number of positions that tables have room for.
        causal: whether queries see no later keys.
        pretrained_length: the length that loaded weights were trained at; None for new weights.
            Scalings of rotations, temperatures and logarithmic buckets are made for it, not for n.
        own_head_dim: D if it is not C / H.
    """

    embed_dim: int
    num_heads: int
    max_positions: int
    causal: bool = False
    pretrained_length: int | None = None
    own_head_dim: int | None = None

    @property
    def head_dim(self) -> int:
        """D, the width of one head."""
        return self.own_head_dim or self.embed_dim // self.num_heads

    @property
    def all_heads_dim(self) -> int:
        """H * D, the width of all heads side by side."""
        return self.num_heads * self.head_dim

    @property
    def trained_length(self) -> int:
        """The length in training: ``pretrained_length``, or for new weights n."""
        return self.max_positions if self.pretrained_length is None else self.pretrained_length

    def scale(self, scale_factor: float | None) -> float:
        """Compute the scale of the scores, 1 / sqrt(scale_factor * D); None is 1."""
        return float(((scale_factor or 1.0) * self.head_dim) ** -0.5)


class Encoding(nn.Module):
    """Base class of all encodings. By default, a method changes nothing; override what you need.

    Options are the keyword-only arguments of the subclass's constructor, with types and defaults:
    the command line, the documentation and the error messages are made from them. Specs refuse
    numbers that are not above 0, unless the type is ``option_values.Signed``.
    """

    name: ClassVar[str]  # set by `register`
    acts_on: ClassVar[Place]  # specs sort by it; at most one each for input, rotation, positions
    # True: the layers that use it have one module (`t5`); False: each has its own (`kerple`).
    shared_by_layers: ClassVar[bool] = False
    whole_stack: ClassVar[bool] = False  # True: all layers use it, whichever of them names it
    widens: ClassVar[bool] = False  # True: its rotation makes queries and keys wider
    has_position_table: ClassVar[bool] = False  # True: a table has a row for each position
    counts_in_sentences: ClassVar[bool] = False  # True: it counts the tokens of each sentence
    takes_real_ids: ClassVar[bool] = False  # True: positions may be any numbers, such as 0.5
    without_options: ClassVar[tuple[str, ...]] = ()  # options of its base class that specs refuse
    length_options: ClassVar[tuple[str, ...]] = ()  # options that only set a table's number of rows
    zeros: ClassVar[tuple[str, ...]] = ()  # names of the parameters that start at 0
    ones: ClassVar[tuple[str, ...]] = ()  # of parameters that start at 1; others are random
    rows_depend_on_causal: ClassVar[bool] = False  # True: rows mean other distances if causal
    causal_reason: ClassVar[str] = ""  # why only causal models can use it; empty: encoders too
    # How many numbers a position has, 2 for the row and column of a patch; 0: it reads no positions
    axes: int = 1
    drawn_below: int | None = None  # random positions are drawn below this; None: it draws none

    def __init__(self, dims: Dims, scale_factor: float | None = None) -> None:
        super().__init__()
        if self.causal_reason and not dims.causal:
            raise UserError(f"{self.name} is for causal models: {self.causal_reason}")
        self.dims = dims
        self.scale_factor = scale_factor  # c of 1 / sqrt(c * D); None: 1, or another encoding's

    def reset_parameters(self) -> None:
        """Set ``zeros`` and ``ones``, and draw the others; `assembly` calls it once."""
        for name, parameter in self.named_parameters():
            if name in self.zeros or name in self.ones:
                nn.init.constant_(parameter, 1.0 if name in self.ones else 0.0)
            else:
                nn.init.normal_(parameter, std=INIT_STD)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Encoding":
        """Move constants with the parameters (torch calls it in ``to``, ``half``); types stay.

        Constants are plain attributes, not buffers: no checkpoint holds them, so whatever empties a
        module before it is loaded (``to_empty``, FSDP2, transformers 5) must not empty them.
        """
        super()._apply(fn, recurse)
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                # `fn` may move, cast or empty: on an empty tensor it only shows the device.
                device = fn(value.new_empty(0)).device
                if device.type != "meta":  # a constant that moved there would lose its values
                    setattr(self, name, value.to(device))
        return self

    def set_dims(self, dims: Dims) -> None:
        """Change the lengths in ``dims``, and what depends on them; the other sizes must stay."""
        self.dims = dims
        self.compute_constants()

    def make_room(self, length: int) -> None:
        """Set ``max_positions`` to ``length``, at least the trained one, unless a table fixes it.

        Raises:
            UserError: :meth:`compute_constants` cannot serve that many tokens.
        """
        if not self.has_position_table:
            trained = self.dims.trained_length
            longest = max(length, trained)
            self.set_dims(self.dims._replace(max_positions=longest, pretrained_length=trained))

    def compute_constants(self) -> None:
        """Compute the constants that depend on the lengths in ``dims``; by default there are none.

        :meth:`set_dims` calls it, and so do constructors of subclasses with constants.
        """

    def extend(self, name: str, weight: Tensor) -> Tensor:
        """Extend a parameter of a checkpoint to this module's distances, if it has fewer.

        ``name`` is that of the parameter in this module, such as ``table.weight``; ``weight``, the
        loaded one, has as many dimensions as the module's.
        """
        return weight

    def embed(self, positions: Positions) -> Tensor | None:
        """Compute vectors ``(B or 1, T, C)`` to add to the token embeddings, or None."""
        return None

    def rotation(self, ids: Tensor) -> Rotation | None:
        """Compute the rotation of queries and keys at positions ``ids``, ``(B or 1, T)``, or None.

        In decoding, ``ids`` are of the new tokens, or of all tokens if a cache has unrotated keys.
        """
        return None

    def forget_gates(self, x: Tensor) -> Tensor | None:
        """Compute the logits of how much each token keeps of the tokens before it, or None.

        The input of the layer, ``(B, T, C)``, gives ``(B, T, H)``; in an encoder ``(B, T, 2 H)``,
        the second half for later keys.
        """
        return None

    def states(self, x: Tensor) -> Tensor | None:
        """Project the input of the layer, ``(B, T, C)``, to states ``(B, H, T, W)``, or None.

        They are multiplied by the rows of :class:`RowsByDistance` whose ``of`` is ``state``.
        """
        return None

    def terms(self, positions: Positions) -> list[Term]:
        """List the terms of scores and values, with rows for all distances of a call."""
        return []

    def all_terms(self, positions: Positions) -> Terms:
        """List :meth:`terms` and the factor of the scores' scale, as backends take them."""
        scale = [] if self.scale_factor is None else [ScaleFactor(self.scale_factor)]
        return Terms([*self.terms(positions), *scale])

    def number(self, positions: Positions) -> Positions:
        """Number the tokens differently, unless this was done before; by default change nothing."""
        return positions

    def mask(self, positions: Positions) -> Mask:
        """Limit the keys that a query may see; by default there is no limit."""
        return NO_MASK


ENCODINGS: dict[str, type[Encoding]] = {}  # name -> class; filled when their modules are imported
EncodingClass = TypeVar("EncodingClass", bound=type[Encoding])
Value = TypeVar("Value")


def register(name: str) -> Callable[[EncodingClass], EncodingClass]:
    """Register an encoding class under the name that specs use."""

    def add(cls: EncodingClass) -> EncodingClass:
        known = ENCODINGS.get(name, cls)  # the same class if a cell of a notebook runs once more
        if (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise UserError(f"two encodings are called {name!r}: rename one of them")
        if not name.isidentifier() or hasattr(Encodings, name):  # a module's attribute of this name
            raise UserError(f"no encoding can be called {name!r}: use other letters, digits or _")
        cls.name = name
        ENCODINGS[name] = cls
        return cls

    return add


class Encodings(nn.ModuleDict):
    """The encodings of a layer by name, in the order of their spec.

    At most one has a rotation, at most one has forget gates, and at most one has states.
    """

    def as_dict(self) -> dict[str, Encoding]:
        """Return the encodings by name, in the order of their spec."""
        return cast("dict[str, Encoding]", dict(self.items()))

    def as_list(self) -> list[Encoding]:
        """List the encodings in the order of their spec."""
        return cast("list[Encoding]", list(self.values()))

    def rotation(self, ids: Tensor) -> Rotation | None:
        """Compute the rotation of a layer (see :meth:`Encoding.rotation`), or None."""
        return find_first(encoding.rotation(ids) for encoding in self.as_list())

    def decay(self, x: Tensor, padding: Tensor | None, past: Decay | None = None) -> Decay | None:
        """Add up the logarithms of forget gates over the tokens, or None where there are no gates.

        Each sum has two parts to add up, more exact than one (:func:`sum_exactly`).

        Args:
            x: the layer's input, ``(B, S, C)``; or with ``past``, of the last T, ``(B, T, C)``.
            padding: True for padding, ``(B, S)``; None if no token is.
            past: the result of earlier steps for all S - T earlier tokens.
        """
        encodings = self.as_list()
        gates = find_first(encoding.forget_gates(x) for encoding in encodings)
        if gates is None:
            return None
        logs = F.logsigmoid(at_least_fp32(gates)).transpose(1, 2)  # [B, H or 2 H, T]
        if padding is not None:  # a gate of 1 forgets nothing
            logs = logs.masked_fill(padding[:, None, -x.size(1) :], 0.0)
        sides = logs.split(encodings[0].dims.num_heads, 1)  # earlier keys; in an encoder also later
        if past is None:
            return Decay(*(sum_exactly(side, before=None) for side in sides))
        sums = [
            torch.cat([before, sum_exactly(side, before=before[:, :, -1:])], 2)  # [B, H, S, 2]
            for side, before in zip(sides, past.tensors().values(), strict=True)  # of `sides`
        ]
        return Decay(*sums)

    def input_terms(self, x: Tensor, positions: Positions, past: Decay | None = None) -> Terms:
        """List the terms that depend on the layer's input: decay (see :meth:`decay`) and states.

        ``x`` is ``(B, S, C)``, or ``(B, T, C)`` if ``past`` has the decay of the other tokens.
        """
        states = find_first(e.states(positions.queries(x)) for e in self.as_list())
        decay = self.decay(x, positions.padding, past)
        terms = [] if states is None else [States(states)]
        return Terms(terms if decay is None else [decay, *terms])

    def terms(self, positions: Positions) -> Terms:
        """Combine the terms of all encodings (see :meth:`Encoding.terms`)."""
        return Terms.combine(x.all_terms(positions) for x in self.as_list())


class SharedEncodings(Encodings):
    """The encodings that the layers of a stack share. A kind of layer uses some of them.

    Args:
        encodings: the encodings by name, in the order of their spec.
        kinds: the names of the encodings that each kind of layer uses: ``(("rope",), ())`` for
            ``3*rope,none``. By default one kind uses all. Before :meth:`terms`, :meth:`select` one.
    """

    def __init__(
        self, encodings: Mapping[str, Encoding], kinds: Iterable[tuple[str, ...]] | None = None
    ) -> None:
        super().__init__(encodings)
        self.kinds = (tuple(encodings),) if kinds is None else tuple(kinds)

    def select(self, kind: int) -> "SharedEncodings":
        """Select the encodings of a kind of layer, now the only one; the modules are the same."""
        return SharedEncodings({name: self.as_dict()[name] for name in self.kinds[kind]})

    def rotations(self, ids: Tensor) -> list[Rotation | None]:
        """Compute the rotation of each kind of layer (see :meth:`Encoding.rotation`), or None."""
        named = self.as_dict()
        return [find_first(named[name].rotation(ids) for name in names) for names in self.kinds]

    def number(self, positions: Positions) -> Positions:
        """Number the tokens of a call for all layers (see :meth:`Encoding.number`)."""
        for encoding in self.as_list():
            positions = encoding.number(positions)
        return positions


def find_first(values: Iterable[Value | None]) -> Value | None:
    """Find the first value that is not None."""
    return next((value for value in values if value is not None), None)
