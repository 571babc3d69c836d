"""Settings that change what weights compute, but no name or shape of a tensor."""

from __future__ import annotations

from typing import Any, NamedTuple

from fairseq_posenc.checkpoints.dictionary import fingerprint

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


class WeightSettings(NamedTuple):
    """Settings of a stack's weights that no name or shape of a tensor shows, positions excepted.

    A field is None where it is not known, or where the stack has no such thing.
    """

    heads: int | None = None  # of self-attention, and of a decoder's cross-attention
    activation: str | None = None  # of the feed-forward blocks
    norm: str | None = None  # `pre` or `post`
    embeddings: str | None = None  # `scaled` by the root of their width, or `unscaled`
    pooler: str | None = None  # activation of classification heads
    # of a causal LM, `on` where `<s>` begins each sample, or `off`
    add_bos_token: str | None = None
    # of a translation model, the encoder's source or the decoder's target
    language: str | None = None
    dictionary: str | None = None  # hash of its symbols in their order

    @classmethod
    def from_config(cls, cfg: Any, layers: Any, dictionary: Any) -> WeightSettings:
        """Read a stack's settings from fairseq's configuration and its part for ``layers``."""
        activation = str(cfg.activation_fn or "relu")
        return cls(
            heads=int(layers.attention_heads),
            activation="gelu_accurate" if activation == "gelu_fast" else activation,  # an old name
            norm="pre" if layers.normalize_before else "post",
            embeddings="unscaled" if cfg.no_scale_embedding else "scaled",
            dictionary=fingerprint(dictionary),
        )

    @classmethod
    def parse(cls, content: dict[str, Any]) -> WeightSettings:
        """Check the fields that a checkpoint has; those of earlier versions lack some or all.

        Raises:
            TypeError: a field is of another kind.
        """
        found = {name: content[name] for name in cls._fields if content.get(name) is not None}
        for name, value in found.items():
            if type(value) is not (int if name == "heads" else str) or not str(value).isprintable():
                raise TypeError(f"{name} is {value!r}")
        return cls(**found)

    def filled_from(self, other: WeightSettings) -> WeightSettings:
        """Fill in the fields that are not known from ``other``."""
        return other._replace(**{n: x for n, x in self._asdict().items() if x is not None})

    def unknown_beside(self, model: WeightSettings) -> list[str]:
        """List the fields that are known of a model, but not of the weights."""
        fields = zip(self._fields, self, model)
        return [name for name, ours, theirs in fields if ours is None and theirs is not None]

    def differences(self, model: WeightSettings, other: str = "the model has") -> list[str]:
        """Compare the fields that both sides know, in words; ``other`` introduces the model's."""
        return [
            f"trained with {_PHRASES[name].format(ours)}, {other} {_PHRASES[name].format(theirs)}"
            for name, ours, theirs in zip(self._fields, self, model)
            if None not in (ours, theirs) and ours != theirs
        ]
