"""What gives the weights of a stack their meaning beside positions, names and shapes."""

from __future__ import annotations

from typing import Any, NamedTuple

from fairseq_posenc.transformer.dictionary import fingerprint

_PHRASES = {
    "heads": "{} heads",
    "activation": "activation {}",
    "norm": "{}-norm layers",
    "embeddings": "{} token embeddings",
    "pooler": "pooler activation {}",
    "add_bos_token": "--add-bos-token {}",
    "language": "language {}",
    "dictionary": "a dictionary with the hash {}",
}


class Meaning(NamedTuple):
    """Settings of a stack that change what its weights compute, but no name or shape of a tensor.

    A field is None where it is not known, or where the stack has no such thing.

    Attributes:
        heads: of self-attention, and of a decoder's cross-attention.
        activation: of the feed-forward blocks.
        norm: ``pre`` or ``post``.
        embeddings: ``scaled`` by the root of their width, or ``unscaled``.
        pooler: activation of classification heads.
        add_bos_token: of a causal LM, ``on`` where ``<s>`` begins each sample, or ``off``.
        language: of a translation model, the encoder's source or the decoder's target.
        dictionary: hash of its symbols in their order.
    """

    heads: int | None = None
    activation: str | None = None
    norm: str | None = None
    embeddings: str | None = None
    pooler: str | None = None
    add_bos_token: str | None = None
    language: str | None = None
    dictionary: str | None = None

    @classmethod
    def of(cls, cfg: Any, layers: Any, dictionary: Any) -> Meaning:
        """Read the settings of a stack.

        Args:
            cfg: fairseq's TransformerConfig.
            layers: its part for the encoder or the decoder.
            dictionary: of the stack's tokens.
        """
        activation = str(cfg.activation_fn or "relu")
        return cls(
            heads=int(layers.attention_heads),
            activation="gelu_accurate" if activation == "gelu_fast" else activation,  # an old name
            norm="pre" if layers.normalize_before else "post",
            embeddings="unscaled" if cfg.no_scale_embedding else "scaled",
            dictionary=fingerprint(dictionary),
        )

    @classmethod
    def decoded(cls, content: dict[str, Any]) -> Meaning:
        """Check the fields that a checkpoint has; those of earlier versions lack some or all.

        Raises:
            TypeError: a field is of another kind.
        """
        found = {name: content[name] for name in cls._fields if content.get(name) is not None}
        for name, value in found.items():
            if type(value) is not (int if name == "heads" else str) or not str(value).isprintable():
                raise TypeError(f"{name} is {value!r}")
        return cls(**found)

    def completed(self, other: Meaning) -> Meaning:
        """Fill in the fields that are not known from ``other``."""
        return other._replace(**{n: x for n, x in self._asdict().items() if x is not None})

    def unknown(self, model: Meaning) -> list[str]:
        """List the fields that a model has and the weights do not say."""
        fields = zip(self._fields, self, model)
        return [name for name, ours, theirs in fields if ours is None and theirs is not None]

    def differences(self, model: Meaning, other: str = "the model has") -> list[str]:
        """Compare the fields that both sides know, in words.

        Args:
            model: the other side.
            other: how messages introduce it.
        """
        return [
            f"trained with {_PHRASES[name].format(ours)}, {other} {_PHRASES[name].format(theirs)}"
            for name, ours, theirs in zip(self._fields, self, model)
            if None not in (ours, theirs) and ours != theirs
        ]
