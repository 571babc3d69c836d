"""The positions of a model as a configuration states them."""

import copy
from typing import Any, NamedTuple

from transformers import PretrainedConfig

from fairseq_posenc.errors import UserError, shortened

POSITIONS = "positions"  # our submodule of a stack and of its attentions; users name it to PEFT
OUR_ATTENTION = "fairseq_posenc"  # name of our attention function in transformers
PASS_STATE = "position_state"  # argument of layers: the `PassState` of their stack
LAYER_STATE = "layer_position_state"  # argument of our attention function: a layer's `LayerState`
SPEC_FIELD = "position_encoding"  # of configurations whose positions were set
SPEC_FIELDS = (SPEC_FIELD, f"{SPEC_FIELD}_decoder")
LENGTH_FIELD = "position_encoding_max_positions"
# Fields that state positions without a spec; `_LAYER_FIELDS` are lists, an entry for each layer.
_LAYER_FIELDS = {"layer_types", "no_rope_layers", "layer_rope_theta"}
_STOCK_FIELDS = {"rope_parameters", "sliding_window", "local_attention", "attn_logit_softcapping"}
_STOCK_FIELDS |= {"relative_attention_num_buckets", "relative_attention_max_distance"}
_STOCK_FIELDS |= _LAYER_FIELDS


class PositionSettings(NamedTuple):
    """The arguments of :func:`fairseq_posenc.hf.set_positions`, as a configuration states them."""

    spec: str
    max_positions: int | None = None  # None: the model's
    decoder_spec: str | None = None  # None: the encoder's
    directions: str = ""  # of an encoder's first layers: `lr,rl` (up to the token; from it on)
    boundary_id: int | None = None  # of the token that ends a sentence; None: not known
    stock_fields: dict[str, Any] | None = None  # values when the spec was set; None: unknown

    def check(self, config: PretrainedConfig) -> None:
        """Refuse values of other types, such as True for a number, and changed stock fields."""
        if not isinstance(self.stock_fields, dict | None):
            raise UserError(f"config.json: restore the dictionary {_FIELDS['stock_fields']}")
        _refuse_change("", vars(config), self.stock_fields or {})
        for name in ("spec", "decoder_spec", "directions"):
            text = getattr(self, name)
            if not isinstance(text, str) and not (text is None and name == "decoder_spec"):
                raise UserError(f"{name} is text, such as 'alibi', not {shortened(repr(text))}")
        for name, least in (("max_positions", 1), ("boundary_id", 0)):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < least):
                raise UserError(f"{name} must be a whole number of at least {least}, not {value!r}")

    @classmethod
    def read(cls, config: PretrainedConfig) -> "PositionSettings":
        """Read them from a configuration; refuse one that states no spec."""
        if not hasattr(config, SPEC_FIELD):
            raise UserError("a stock configuration: build its model by an Auto class")
        return cls(**{x: getattr(config, k) for x, k in _FIELDS.items() if hasattr(config, k)})

    def write(self, config: PretrainedConfig) -> None:
        """Write them to a configuration, without those that have their defaults."""
        # Qwen's classes drop the size of windows on loading, if none are used.
        dropped = "" if getattr(config, "use_sliding_window", True) else "sliding_window"
        stock = {x: y for x, y in vars(config).items() if x in _STOCK_FIELDS and x != dropped}
        for name, value in self._replace(stock_fields=copy.deepcopy(stock))._asdict().items():
            if value not in (None, ""):
                setattr(config, _FIELDS[name], value)
            elif hasattr(config, _FIELDS[name]):
                delattr(config, _FIELDS[name])


def _refuse_change(name: str, now: Any, then: Any) -> None:
    """Refuse a stock field or entry that was changed, to no effect, after the spec was set."""
    if isinstance(now, dict) and isinstance(then, dict):
        for key, value in then.items():  # a later version of transformers may add keys
            _refuse_change(key, now.get(key), value)
        return
    has_fewer_layers = name in _LAYER_FIELDS and now and then and len(now) < len(then)
    if now != then and not has_fewer_layers:  # shorter lists: layers were removed
        raise UserError(f"{name} was {then!r}: restore it; only set_positions changes positions")


_FIELDS = {  # fields of a configuration, by those of `PositionSettings`
    "spec": SPEC_FIELD,
    "max_positions": LENGTH_FIELD,
    "decoder_spec": SPEC_FIELDS[1],
    "directions": "attention_directions",
    "boundary_id": f"{SPEC_FIELD}_boundary_id",
    "stock_fields": f"{SPEC_FIELD}_replaced",
}
