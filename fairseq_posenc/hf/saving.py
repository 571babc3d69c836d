"""Saves and loads models whose positions were set.

A folder has the spec in its configuration, with all options, and all weights. transformers' Auto
classes load it once ``fairseq_posenc.hf`` is imported, or by ``trust_remote_code=True``, for which
the folder has a small loader.

Without this package nothing loads it as the stock model, whose positions differ: Auto classes do
not know its model type, nor stock classes its attention function. In the file of weights, the
record of positions has the name of a stock weight, which has another (``record.exchange_names``),
so loaders of weights alone stop as well; and so in state dicts of a model around this one.
"""

import json
import logging
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any, cast

from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

from fairseq_posenc.derived import Derived, add_mixin, derive
from fairseq_posenc.errors import UserError, how_to_install, shortened
from fairseq_posenc.hf import record
from fairseq_posenc.hf.replacing import replace_positions
from fairseq_posenc.hf.settings import OUR_ATTENTION, SPEC_FIELD, SPEC_FIELDS, PositionSettings
from fairseq_posenc.hf.stock_folders import NoStockModelError, find_stock_model
from fairseq_posenc.identity import is_identity
from fairseq_posenc.specs import parse

logger = logging.getLogger(__name__)
_AUTO_NAMES = sorted(x for x in modeling_auto.__all__ if x.startswith("AutoModel"))
AUTO_CLASSES: list[Any] = [getattr(modeling_auto, name) for name in _AUTO_NAMES]
_LOADER = "positions_loader"  # the module of `auto_map`, which `trust_remote_code=True` runs
_LOADER_TEXT = f'''\
"""Loads the model of this folder; config.json says which positions it has."""

try:
    from fairseq_posenc.hf.saving import PositionsConfig
except ImportError as error:
    message = "this model has other positions than its class in transformers: "
    raise ImportError(message + """{how_to_install("hf")}""") from error
'''
MODEL_TYPE = "fairseq_posenc.hf"  # in config.json; an error of transformers quotes an unknown type
_STOCK_TYPE = "base_model_type"  # key of the model type without positions, in config.json
CLASS_PREFIX = "fairseq_posenc.hf."  # of classes in `architectures`, which are not stock
_ATTENTION = "attn_implementation"  # key of the attention function, in config.json
# Prefixes that wrappers of a model, unlike models around it, give the names of its weights.
_WRAPPERS = re.compile(r"((module|_orig_mod|_fsdp_wrapped_module|base_model(\.model)?)\.)*")
# TRL, for example, reloads the model from this name as the reference; an error then quotes it.
_NO_FOLDER = (
    "a model whose positions were set: save it and load it from its folder, or pass what was to be "
    "loaded by this name (ref_model, processing_class)"
)


def make_saveable(model: Any) -> None:
    """Make a model save and load its positions: it and its configuration get derived classes."""
    if not isinstance(model.config, ConfigWithPositions):
        model.config.__class__ = _derive_and_register(model.config.__class__)
    add_mixin(model, ModelWithPositions)
    model.add_model_tags("fairseq-posenc")  # on the hub
    model.is_saved = False
    model.record_in_adapters()
    model.config._name_or_path = _NO_FOLDER
    model.name_or_path = ""  # which PEFT writes to adapters: their base model is in no folder


@cache
def _derive_and_register(stock: Any) -> Any:
    """Derive a configuration class with positions from a stock class, and register its models."""
    derived = derive(stock, (ConfigWithPositions,))  # also the `config_class` of its models
    for auto in AUTO_CLASSES:
        model_class = auto._model_mapping.get(stock, None)  # in some, a tuple of classes
        if getattr(model_class, "config_class", None) is stock:
            auto.register(derived, derive(model_class, (ModelWithPositions,)), exist_ok=True)
    return derived


class ConfigWithPositions(Derived):
    """The part of a configuration with positions that its stock class, ``super()``, lacks."""

    def __init_subclass__(cls, **named: Any) -> None:
        super().__init_subclass__(**named)
        # Auto classes find stock configurations by their names, and in transformers 5.14 to 5.23
        # they do not register a configuration whose module is transformers'.
        cls.__name__ += "WithPositions"
        cls.__module__ = __name__

    def to_json_string(self, use_diff: bool = True) -> str:
        """Write config.json with the changes that keep stock classes from loading the folder."""
        stock = json.loads(super().to_json_string(use_diff))  # type: ignore[misc]
        classes = [name.removeprefix(CLASS_PREFIX) for name in stock.get("architectures") or ()]
        # With all options: a default of this package that changes later must not change the model.
        full_specs = {key: parse(stock[key]).full() for key in SPEC_FIELDS if key in stock}
        content = {
            **stock,
            "model_type": MODEL_TYPE,
            _STOCK_TYPE: stock["model_type"],
            **full_specs,
            _ATTENTION: OUR_ATTENTION,
            "architectures": [CLASS_PREFIX + name for name in classes],
            "auto_map": {"AutoConfig": f"{_LOADER}.{PositionsConfig.__name__}"},
        }
        return json.dumps(content, indent=2, sort_keys=True) + "\n"

    def to_json_file(self, json_file_path: Any, use_diff: bool = True) -> None:
        """Write config.json as transformers does, and our loader beside it, before any upload."""
        super().to_json_file(json_file_path, use_diff)  # type: ignore[misc]
        Path(json_file_path).with_name(f"{_LOADER}.py").write_text(_LOADER_TEXT, encoding="utf-8")

    @classmethod
    def get_config_dict(cls, source: Any, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Read a folder's configuration as the stock class does, and undo the changes."""
        content, others = super().get_config_dict(source, **kwargs)  # type: ignore[misc]
        return _read_content(content), others


class PositionsConfig(PretrainedConfig):
    """What Auto classes find by the model type of saved folders; builds their configurations."""

    model_type = MODEL_TYPE

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Build the configuration of the stock model with positions."""
        content = _read_content(config_dict)
        stock_type = str(content["model_type"])
        if stock_type not in CONFIG_MAPPING or stock_type == MODEL_TYPE:
            raise UserError(f"config.json: transformers has no type {shortened(stock_type)!r}")
        return _derive_and_register(CONFIG_MAPPING[stock_type]).from_dict(content, **kwargs)


def _read_content(content: dict[str, Any]) -> dict[str, Any]:
    """Undo :meth:`ConfigWithPositions.to_json_string`, but for what each save writes again."""
    if content.get("model_type") != MODEL_TYPE:
        return content
    if not isinstance(spec := content.get(SPEC_FIELD), str):
        raise UserError(f"config.json: {SPEC_FIELD} must be a spec, not {shortened(repr(spec))}")
    stock = {k: x for k, x in content.items() if k not in (_STOCK_TYPE, _ATTENTION)}
    return {**stock, "model_type": content.get(_STOCK_TYPE)}


class ModelWithPositions(Derived):
    """The part of a model with positions that its stock class, here ``super()``, lacks."""

    is_first = True  # of mixins: its `state_dict` calls, and undoes, that of `StackWithPositions`
    config: PretrainedConfig
    is_saved = True  # whether a folder has these positions; read by `AdapterRecords`

    def __init_subclass__(cls, **named: Any) -> None:
        super().__init_subclass__(**named)
        cls.config_class = derive(cls.stock.config_class, (ConfigWithPositions,))  # type: ignore[attr-defined]

    def __init__(self: Any, config: PretrainedConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        replace_positions(self, PositionSettings.read(config), extend=None)  # no tables to extend
        self.record_in_adapters()

    def record_in_adapters(self: Any) -> None:
        """Let PEFT record the positions in adapters, if a program uses it: importing it is slow."""
        if sys.modules.get("peft") and not hasattr(self, record.PART):
            from fairseq_posenc.hf.adapters import AdapterRecords

            self.add_module(record.PART, AdapterRecords(self))

    def save_pretrained(
        self,
        save_directory: Any,
        is_main_process: bool = True,
        state_dict: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Save the model as transformers does.

        The folder is a stock one if a stock model computes the same. Otherwise, which is logged, it
        has the spec, and records of the positions under names of stock weights; so have all folders
        from which ``Trainer`` resumes, and all for which a ``state_dict`` is given.
        """
        if kwargs.get("distributed_checkpoint"):
            raise UserError("distributed_checkpoint=True does not record positions: leave it out")
        if getattr(self, "_hf_peft_config_loaded", False):  # only adapters, under PEFT's names
            return super().save_pretrained(save_directory, is_main_process, state_dict, **kwargs)  # type: ignore[misc]
        if getattr(self, "hf_quantizer", None):  # it would ignore `state_dict` below
            raise UserError(
                "a quantized model cannot be saved with its positions: save it before, and load it "
                "by from_pretrained(folder, quantization_config=...)"
            )
        folder = Path(save_directory)
        if state_dict is None and not re.fullmatch(r"checkpoint-\d+", folder.name):  # of Trainer
            try:
                stock = find_stock_model(self)
            except NoStockModelError as reason:
                logger.warning("only this package loads the saved model: %s", reason)
            else:
                stock.save_pretrained(folder, is_main_process=is_main_process, **kwargs)
                self.is_saved = True
                if is_main_process:
                    (folder / f"{_LOADER}.py").unlink(missing_ok=True)  # of an earlier save
                return
        state_dict = dict(self.state_dict() if state_dict is None else state_dict)
        record.exchange_names(state_dict, type(self.config), saving=True)
        kwargs["save_original_format"] = False  # True would rename weights, and so the record
        super().save_pretrained(folder, is_main_process, state_dict, **kwargs)  # type: ignore[misc]
        self.is_saved = True

    @classmethod
    def from_pretrained(cls, source: Any, *args: Any, **kwargs: Any) -> Any:
        """Load a model, from a stock folder a stock one; refuse weights of other positions."""
        if kwargs.get("config") is None:  # else it was read already, such as by an Auto class
            content, _ = cls.config_class.get_config_dict(source, **kwargs)  # type: ignore[attr-defined]
            if SPEC_FIELD not in content:
                return cls.stock.from_pretrained(source, *args, **kwargs)
        if kwargs.get(_ATTENTION) == OUR_ATTENTION:  # another model's, as TRL passes it on
            del kwargs[_ATTENTION]
        pattern = record.stock_name_pattern(cls.config_class)  # type: ignore[attr-defined]
        # Names in files -> in the model: of a record (\1: its stack), of the weight it replaces.
        ours = {f"^{pattern}$": rf"\1{record.KEY}", rf"^(.+){re.escape(record.SUFFIX)}$": r"\1"}
        is_named = any(map(is_identity, kwargs.get("state_dict") or ()))  # as in models, not files
        # The info then lists all weights of other shapes, which are checked below.
        named = {**kwargs, "output_loading_info": True, "ignore_mismatched_sizes": True}
        named["key_mapping"] = {**({} if is_named else ours), **(kwargs.get("key_mapping") or {})}
        model, info = super().from_pretrained(source, *args, **named)  # type: ignore[misc]
        may_resize = kwargs.get("ignore_mismatched_sizes")
        record.refuse_other_weights(
            filter(record.is_of_positions, info["missing_keys"]),
            filter(record.is_of_positions, info["unexpected_keys"]),
            [x for x in info["mismatched_keys"] if record.is_of_positions(x[0]) or not may_resize],
        )
        return (model, info) if kwargs.get("output_loading_info") else model

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the weights as torch does; PEFT reads them before it saves adapters.

        The stack (``StackWithPositions``) exchanges names in its own state dict. They are exchanged
        back here if this is the whole model: torch's ``prefix`` is then empty, or a wrapper's.
        """
        self.record_in_adapters()  # PEFT may be imported by now
        state: dict[str, Any] = super().state_dict(*args, **kwargs)  # type: ignore[misc]
        if _WRAPPERS.fullmatch(kwargs.get("prefix", "")):
            record.exchange_names(state, type(self.config), saving=False)
        return state

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load weights, such as those of a saved folder; refuse those of other positions.

        torch calls it before it loads the parts, with the weights under ``prefix`` alone; changing
        their dictionary in place is allowed, and reaches the parts.
        """
        record.exchange_names(state_dict, type(self.config), saving=False)
        if not any(map(is_identity, state_dict)):  # without a record of positions
            names = [name for name in self.state_dict() if not record.is_of_positions(name)]
            has = f"the model has {getattr(self.config, SPEC_FIELD)}"
            if all(prefix + name in state_dict for name in names):
                raise UserError(
                    f"these are the weights of a model whose positions were not set, and {has}: "
                    "load them before set_positions"
                )
            # Weights with fewer names belong to an adapter, or to a part of a model.
            logger.warning("nothing shows which positions these weights were trained with; %s", has)
        for key, positions in record.list_positions(cast(PreTrainedModel, self)).items():
            if (of_adapter := state_dict.pop(f"{prefix}{record.PART}.{key}", None)) is not None:
                positions.set_extra_state(of_adapter)  # from `AdapterRecords`; refuses another spec
        super()._load_from_state_dict(state_dict, prefix, *args)  # type: ignore[misc]

    def _validate_generation_mode(self, mode: str, config: Any, *args: Any) -> None:
        """Refuse ways of generating whose calls may mix a prompt's tokens with later ones."""
        specs = [getattr(self.config, key, "") for key in SPEC_FIELDS]
        is_stepwise = config.use_cache and mode != "assisted_generation"
        if not is_stepwise and any("prefill=true" in spec for spec in specs):
            raise UserError(
                "window(prefill=true) is for tokens that are generated one by one, with a cache: "
                "leave out use_cache=False, assistant_model and prompt_lookup_num_tokens"
            )
        super()._validate_generation_mode(mode, config, *args)  # type: ignore[misc]

    def _prepare_attention_mask_for_generation(self, tokens: Any, config: Any, *args: Any) -> Any:
        """Find padding, but not in what an assistant continues: it may generate this symbol."""
        find = super()._prepare_attention_mask_for_generation  # type: ignore[misc]
        return tokens.new_ones(tokens.shape) if config.is_assistant else find(tokens, config, *args)

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> None:
        """Refuse paged caches here: transformers would only log that a pass refuses them."""
        raise UserError(
            "no continuous batching here: generate without cache_implementation='paged'"
        )

    def resize_position_embeddings(self, *args: Any, **kwargs: Any) -> None:
        """Refuse to put the stock class's own table beside these positions."""
        raise UserError("change the length by set_positions(model, 'own', max_positions=...)")

    def load_adapter(self, *args: Any, **kwargs: Any) -> None:
        """Refuse adapters that transformers would load, as it cannot compare their positions."""
        raise UserError("load_adapter compares no positions: PeftModel.from_pretrained(model, ...)")


AutoConfig.register(MODEL_TYPE, PositionsConfig, exist_ok=True)
