"""Defines the configuration of an exported model and of its stacks.

Exported folders hold a copy of this module (see the package).
"""

from __future__ import annotations

from typing import Any, NamedTuple, Optional

from transformers import PretrainedConfig

from fairseq_posenc.encodings.base import ENCODINGS, Dims, Encodings
from fairseq_posenc.registry import module_owner


class StackConfig(NamedTuple):
    """The configuration of an encoder or a decoder."""

    vocab_size: int  # number of symbols
    padding_idx: int  # symbol of padding
    eos_idx: int  # symbol that ends a sentence
    unk_idx: int  # symbol in place of unknown ones
    embed_dim: int  # C
    ffn_dim: int  # width of the feed-forward layers
    num_heads: int  # H
    num_layers: int
    max_positions: int  # rows of the position tables
    trained_on: int  # length of the training's samples
    # for each layer, the name and options of its encodings; a shorter list is repeated
    positions: list[dict[str, dict[str, Any]]]
    directions: list[str]  # for each layer `both`, `lr` (a query sees no later key) or `rl`
    causal: bool  # whether it is a decoder
    embed_scale: float  # factor of the token embeddings
    activation: str  # transformers' name of the feed-forward layers' activation
    embedding_norm: bool  # whether there is a layer norm after the embeddings
    norm_before: bool  # whether layer norms are before each block, else after it
    final_norm: bool  # whether there is a layer norm after the last layer
    memory_dim: Optional[int] = None  # width of the encoder's output, in a decoder with one
    dropout: float = 0.0  # on embeddings and on the output of each block
    attention_dropout: float = 0.0  # on attention weights
    activation_dropout: float = 0.0  # inside the feed-forward layers

    def layer(self, number: int) -> dict[str, dict[str, Any]]:
        """Select the encodings of a layer, counted from 0."""
        return self.positions[number % len(self.positions)]

    @property
    def layer_kinds(self) -> list[dict[str, dict[str, Any]]]:
        """The encodings of layers that differ: two entries if every fourth layer has none."""
        kinds: list[dict[str, dict[str, Any]]] = []
        for layer in self.positions:
            if layer not in kinds:
                kinds.append(layer)
        return kinds

    def build_encodings(self, owner: str, number: Optional[int] = None) -> Encodings:
        """Build encodings with new parameters.

        Args:
            owner: what holds the modules: the ``input``, the ``stack`` (for all layers) or a
                ``layer``.
            number: index of that layer.
        """
        layers = self.layer_kinds if number is None else [self.layer(number)]
        modules = self._name_modules(layers, owner)
        dims = self._find_dims(owner)
        encodings = Encodings(
            {module: ENCODINGS[name](dims, **opts) for module, (name, opts) in modules.items()}
        )
        encodings.kinds = tuple(
            tuple(module for module, chosen in modules.items() if chosen in layer.items())
            for layer in layers
        )
        for encoding in encodings.as_list():
            encoding.reset_parameters()
        return encodings

    def _name_modules(
        self, layers: list[dict[str, dict[str, Any]]], owner: str
    ) -> dict[str, tuple[str, dict[str, Any]]]:
        """Name the modules of an owner; return the name and the options of each one's encoding.

        With other options in another layer, an encoding has further modules: ``rope``, ``rope_2``.
        The names of weights contain these names, which :func:`fairseq_posenc.specs.name_modules`
        gives as well.
        """
        modules: dict[str, tuple[str, dict[str, Any]]] = {}
        for name, options in (chosen for layer in layers for chosen in layer.items()):
            if module_owner(ENCODINGS[name]) == owner and (name, options) not in modules.values():
                same = sum(name == other for other, _ in modules.values())
                modules[f"{name}_{same + 1}" if same else name] = name, options
        return modules

    def _find_dims(self, owner: str) -> Dims:
        """Find the sizes of encodings; tables of the input have all rows that may be drawn."""
        sizes = (self.embed_dim, self.num_heads, self.max_positions, self.causal, self.trained_on)
        dims = Dims(*sizes)
        for name, options in (chosen for layer in self.layer_kinds for chosen in layer.items()):
            limit = ENCODINGS[name].drawn_from(options)
            if owner == "input" and limit is not None:
                dims = dims._replace(max_positions=limit)
        return dims


class PosencConfig(PretrainedConfig):
    """Configuration of a model with chosen position encodings.

    Args:
        encoder_stack: fields of the encoder's :class:`StackConfig`; None without an encoder.
        decoder_stack: fields of the decoder's :class:`StackConfig`; None without a decoder.
        tied_output: whether the output embeddings are the input embeddings.
        head_activation: activation of the head, by its name in transformers.
        **kwargs: passed on to transformers.
    """

    model_type = "fairseq_posenc"

    def __init__(
        self,
        encoder_stack: Optional[dict[str, Any]] = None,
        decoder_stack: Optional[dict[str, Any]] = None,
        tied_output: bool = True,
        head_activation: str = "gelu",
        **kwargs: Any,
    ) -> None:
        self.encoder_stack = encoder_stack
        self.decoder_stack = decoder_stack
        self.tied_output = tied_output
        self.head_activation = head_activation
        last = decoder_stack or encoder_stack or {}
        # The names that transformers reads and saves; they always follow the stacks.
        derived = {
            "vocab_size": last.get("vocab_size", 0),
            "hidden_size": last.get("embed_dim", 0),
            "num_attention_heads": last.get("num_heads", 0),
            "num_hidden_layers": last.get("num_layers", 0),
            "max_position_embeddings": last.get("max_positions", 0),
        }
        for name, value in derived.items():
            setattr(self, name, value)
            kwargs.pop(name, None)
        kwargs["tie_word_embeddings"] = False  # a tied output has no weight of its own here
        super().__init__(**kwargs)
