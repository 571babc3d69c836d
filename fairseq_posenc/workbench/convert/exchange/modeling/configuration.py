"""What an exported model is made of."""

from __future__ import annotations

from typing import Any, NamedTuple, Optional

from transformers import PretrainedConfig

from fairseq_posenc.encodings.base import ENCODINGS, Dims, Encodings
from fairseq_posenc.registry import module_place


class StackConfig(NamedTuple):
    """An encoder or a decoder."""

    vocab_size: int  # number of symbols
    padding_idx: int  # symbol of padding
    eos_idx: int  # symbol that ends a sentence
    unk_idx: int  # symbol of what the model has no symbol for
    embed_dim: int  # C
    ffn_dim: int  # width of the feed-forward layers
    num_heads: int  # H
    num_layers: int  # number of layers
    max_positions: int  # rows of the position tables
    trained_on: int  # the length that the model was trained at
    # name -> options of an encoding, for successive layers; repeated over the stack
    positions: list[dict[str, dict[str, Any]]]
    directions: list[str]  # what each layer sees: `both`, `lr` (up to the token) or `rl`
    causal: bool  # whether it is a decoder
    embed_scale: float  # factor of the token embeddings
    activation: str  # transformers' name of the feed-forward layers' activation
    embedding_norm: bool  # whether embeddings are normed
    norm_before: bool  # whether each block norms its input, else its output
    final_norm: bool  # whether the output of the last layer is normed
    # width of the encoder's output that a decoder attends to, or None
    memory_dim: Optional[int] = None
    dropout: float = 0.0  # on embeddings and on each block's output
    attention_dropout: float = 0.0  # on attention weights
    activation_dropout: float = 0.0  # inside the feed-forward layers

    def layer(self, number: int) -> dict[str, dict[str, Any]]:
        """Select the encodings of a layer, counted from 0."""
        return self.positions[number % len(self.positions)]

    @property
    def kinds(self) -> list[dict[str, dict[str, Any]]]:
        """The encodings of the layers that differ, each once."""
        earlier = enumerate(self.positions)
        return [
            layer_names
            for number, layer_names in earlier
            if layer_names not in self.positions[:number]
        ]

    def build_encodings(self, place: str, number: Optional[int] = None) -> Encodings:
        """Build the encodings of the input, of the whole stack, or of the layer of a number."""
        dims = Dims(
            self.embed_dim, self.num_heads, self.max_positions, self.causal, self.trained_on
        )
        layers = self.kinds if number is None else [self.layer(number)]
        # module name -> name and options of an encoding
        items: dict[str, tuple[str, dict[str, Any]]] = {}
        for layer in layers:
            for name, options in layer.items():
                limit = ENCODINGS[name].drawn_from(options.items())
                if place == "input" and limit is not None:
                    dims = dims._replace(max_positions=limit)
                if module_place(ENCODINGS[name]) != place or (name, options) in items.values():
                    continue
                same = sum(name == other for other, _ in items.values())
                items[f"{name}_{same + 1}" if same else name] = name, options
        encodings = Encodings(
            {module: ENCODINGS[name](dims, **options) for module, (name, options) in items.items()}
        )
        encodings.kinds = tuple(
            tuple(module for module, (name, options) in items.items() if layer.get(name) == options)
            for layer in layers
        )
        for encoding in encodings.as_list():
            encoding.reset_parameters()
        return encodings


class PosencConfig(PretrainedConfig):
    """Configuration of a model with position encodings as parts.

    Args:
        encoder_stack: fields of a :class:`StackConfig`, or None for a causal language model.
        decoder_stack: the decoder's, or None for a model without one.
        tied_output: whether the output embeddings are the input embeddings.
        head_activation: of the head for masked tokens, as transformers calls it.
        **kwargs: of transformers.
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
        # Under the names that transformers looks for.
        self.vocab_size = last.get("vocab_size", 0)
        self.hidden_size = last.get("embed_dim", 0)
        self.num_attention_heads = last.get("num_heads", 0)
        self.num_hidden_layers = last.get("num_layers", 0)
        self.max_position_embeddings = last.get("max_positions", 0)
        derived = ("vocab_size", "hidden_size", "num_attention_heads", "num_hidden_layers")
        for name in (*derived, "max_position_embeddings"):
            kwargs.pop(name, None)
        kwargs["tie_word_embeddings"] = False  # a tied output has no weight of its own here
        super().__init__(**kwargs)
