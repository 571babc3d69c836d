"""Saves and loads models whose positions were set.

A folder has the spec in its configuration, and all weights; transformers' Auto classes load it once
``fairseq_posenc.hf`` is imported. Without this package, nothing can load it as the stock model,
whose positions are different: its model type is unknown to transformers, its configuration names an
impossible file of weights, and its weights have different names.
"""

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, cast

import transformers
from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig, PreTrainedModel

from fairseq_posenc.errors import UserError, how_to_install, shortened
from fairseq_posenc.hf.cards import TAG, CardFields, write_card
from fairseq_posenc.hf.derived import Derived, add_mixin, derive
from fairseq_posenc.hf.record import (
    is_of_positions,
    pop_adapter_records,
    read_adapter,
    set_saved,
)
from fairseq_posenc.hf.replacing import replace_positions
from fairseq_posenc.hf.settings import LENGTH_FIELD, SPEC_FIELD, PositionSettings
from fairseq_posenc.identity import is_identity
from fairseq_posenc.specs import parse

# Model type of folders. Where this package is not imported, transformers' error quotes it.
MODEL_TYPE = "fairseq_posenc.hf"
_STOCK_TYPE = "base_model_type"  # key of the model type without positions, in config.json
# The key of the name of the file with the weights. A folder has `_MESSAGE` there: as there is no
# such file, transformers stops with an error that quotes it.
_WEIGHTS = "transformers_weights"
_MESSAGE = f"other positions: {how_to_install('hf')}, and import fairseq_posenc.hf"
_SUFFIX = ".fairseq_posenc"  # suffix of the names of all weights in a folder
_STRIP = {rf"^(.+){re.escape(_SUFFIX)}$": r"\1"}  # removes it, as a `key_mapping` of transformers
_CLASS_PREFIX = "fairseq_posenc.hf."  # prefix of the classes in the `architectures` of a folder
_AUTO_CLASSES: tuple[Any, ...] = (
    transformers.AutoModel,
    transformers.AutoModelForCausalLM,
    transformers.AutoModelForMaskedLM,
    transformers.AutoModelForMultipleChoice,
    transformers.AutoModelForNextSentencePrediction,
    transformers.AutoModelForPreTraining,
    transformers.AutoModelForQuestionAnswering,
    transformers.AutoModelForSeq2SeqLM,
    transformers.AutoModelForSequenceClassification,
    transformers.AutoModelForSpeechSeq2Seq,
    transformers.AutoModelForTextEncoding,
    transformers.AutoModelForTokenClassification,
)


def make_saveable(model: PreTrainedModel) -> None:
    """Make a model save and load its positions, in place.

    The classes of the model and its configuration are replaced by classes derived from them.
    """
    if not isinstance(model.config, _ConfigWithPositions):
        stock: Any = type(model.config)
        model.config.__class__ = _derive_and_register(stock)
    if not isinstance(model, _ModelWithPositions):
        add_mixin(model, _ModelWithPositions)
        model.add_model_tags(TAG)


def load_model(folder: Path, **settings: Any) -> PreTrainedModel:
    """Load the model of a folder, stock or with positions, as the class that the folder names.

    Args:
        folder: folder of transformers.
        settings: options of ``from_pretrained``.

    Raises:
        UserError: the folder cannot be read, or none of the Auto classes here has its class.
    """
    try:
        config = AutoConfig.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise UserError(f"{folder}: {shortened(str(error).partition(chr(10))[0])}") from None
    name = next(iter(config.architectures or ()), None)
    auto = _find_auto_class(type(config), str(name))
    if auto is None:
        raise UserError(
            f"{folder}: its config.json names the class {shortened(str(name))}, which is not a "
            f"model of text of type {shortened(str(config.model_type))!r}"
        )
    try:
        return cast(PreTrainedModel, auto.from_pretrained(folder, config=config, **settings))
    except OSError as error:  # weights are missing or truncated
        raise UserError(f"{folder}: {shortened(str(error).partition(chr(10))[0])}") from None


def _find_auto_class(config_class: Any, name: str) -> Any:
    """Find the Auto class that builds the model class ``name`` from a configuration."""
    for auto in _AUTO_CLASSES:
        classes = auto._model_mapping.get(config_class, ())
        classes = classes if isinstance(classes, tuple) else (classes,)  # Funnel has two
        if name in [cls.__name__ for cls in classes]:
            return auto
    return None


@cache
def _derive_and_register(stock: Any) -> Any:
    """Derive a configuration class with positions from a stock class, and register its models.

    Model classes refer to the configuration class, so :func:`_make_config_class` makes it first.
    """
    derived = _make_config_class(stock)
    for auto in _AUTO_CLASSES:
        if stock in auto._model_mapping:
            auto.register(derived, _derive_model(auto._model_mapping[stock]), exist_ok=True)
    return derived


@cache
def _make_config_class(stock: Any) -> Any:
    # The class has a different name and module from the stock class: Auto classes find stock
    # configurations by their names, and in transformers 5.14 to 5.23 they do not register a
    # configuration whose module is transformers'.
    name = f"{stock.__name__}WithPositions"
    return type(name, (_ConfigWithPositions, stock), {"stock": stock})


def _derive_model(stock: Any) -> Any:
    """Derive a model class with positions from a stock class."""
    return derive(stock, (_ModelWithPositions,))


def _rebuild(derive: Callable[[type], Any], stock: type) -> Any:
    """Create an empty object of a derived class, for pickle to fill."""
    derived = derive(stock)
    return derived.__new__(derived)


class _ConfigWithPositions:
    """The part of a configuration with positions that its stock class lacks."""

    stock: type

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _rebuild, (_derive_and_register, self.stock), self.__dict__

    def to_json_string(self, use_diff: bool = True) -> str:
        """Write the configuration with the changes that keep stock classes from reading it."""
        stock = json.loads(super().to_json_string(use_diff))  # type: ignore[misc]
        classes = [_CLASS_PREFIX + name for name in stock.get("architectures") or ()]
        content = {
            **stock,
            "model_type": MODEL_TYPE,
            _STOCK_TYPE: stock["model_type"],
            _WEIGHTS: _MESSAGE,
            "architectures": classes,
        }
        return json.dumps(content, indent=2, sort_keys=True) + "\n"

    @classmethod
    def get_config_dict(cls, source: Any, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Read a folder's configuration as the stock class does, and undo those changes."""
        content, others = super().get_config_dict(source, **kwargs)  # type: ignore[misc]
        return _read_content(content), others


class PositionsConfig(PretrainedConfig):
    """Stands for the model type of saved folders in Auto classes; builds their configurations."""

    model_type = MODEL_TYPE

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Build the configuration of the stock model with positions.

        Raises:
            UserError: the spec is invalid, or this version of transformers lacks the model.
        """
        content = _read_content(config_dict)
        stock_type = str(content["model_type"])
        if stock_type not in CONFIG_MAPPING or stock_type == MODEL_TYPE:
            raise UserError(
                f"config.json: transformers {transformers.__version__} has no models of type "
                f"{shortened(stock_type)!r}"
            )
        return _derive_and_register(CONFIG_MAPPING[stock_type]).from_dict(content, **kwargs)


def _read_content(content: dict[str, Any]) -> dict[str, Any]:
    """Undo :meth:`_ConfigWithPositions.to_json_string`."""
    if content.get("model_type") != MODEL_TYPE:
        return content
    content = dict(content)
    content["model_type"] = content.pop(_STOCK_TYPE, None)
    content.pop(_WEIGHTS, None)
    names = content.get("architectures") or ()
    content["architectures"] = [str(name).removeprefix(_CLASS_PREFIX) for name in names]
    spec = content.get(SPEC_FIELD)
    length = content.get(LENGTH_FIELD)
    if not isinstance(spec, str) or not isinstance(length, int) or length < 1:
        raise UserError(
            f"config.json: {SPEC_FIELD} must be a spec and {LENGTH_FIELD} a number of at least 1, "
            f"not {shortened(repr(spec))} and {shortened(repr(length))}"
        )
    content[SPEC_FIELD] = str(parse(spec))
    return content


class _ModelWithPositions(Derived):
    """The part of a model with positions that its stock class lacks.

    In a derived class it comes before the stock class, so ``super()`` is the stock class.
    """

    config: PretrainedConfig

    def __init_subclass__(cls, **named: Any) -> None:
        super().__init_subclass__(**named)
        if hasattr(cls, "stock"):
            cls.config_class = _make_config_class(cls.stock.config_class)  # type: ignore[attr-defined]

    def __init__(self, config: PretrainedConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        model = cast(PreTrainedModel, self)
        replace_positions(model, PositionSettings.read(config), extend=None)

    def save_pretrained(
        self,
        save_directory: Any,
        is_main_process: bool = True,
        state_dict: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Save the model as transformers does, with a suffix on the names of its weights."""
        # A model with adapters saves only these, under PEFT's names.
        is_whole = not getattr(self, "_hf_peft_config_loaded", False)
        if is_whole:
            weights = self.state_dict() if state_dict is None else state_dict  # type: ignore[attr-defined]
            state_dict = {name + _SUFFIX: weight for name, weight in weights.items()}
        super().save_pretrained(  # type: ignore[misc]
            save_directory, is_main_process=is_main_process, state_dict=state_dict, **kwargs
        )
        if is_whole:
            set_saved(cast(PreTrainedModel, self), is_saved=True)
        # When it pushes, transformers calls `_upload_modified_files`, which writes the card.
        if is_main_process and not kwargs.get("push_to_hub"):
            write_card(Path(save_directory), self._card_fields())

    def _upload_modified_files(self, working_dir: Any, *args: Any, **kwargs: Any) -> Any:
        """Upload a saved model as transformers does, after a card says how to load it."""
        write_card(Path(working_dir), self._card_fields(), complete=True)
        return super()._upload_modified_files(working_dir, *args, **kwargs)  # type: ignore[misc]

    def _card_fields(self) -> CardFields:
        name = type(self).__name__
        config = self.config
        auto = _find_auto_class(type(config), name) or transformers.AutoModel
        return CardFields(
            class_name=name,
            auto_class=auto.__name__,
            spec=getattr(config, SPEC_FIELD),
            length=getattr(config, LENGTH_FIELD),
        )

    @classmethod
    def from_pretrained(cls, source: Any, *args: Any, **kwargs: Any) -> Any:
        """Load a model from a folder, as transformers does.

        Raises:
            UserError: the weights do not belong to a model with the positions of the folder.
        """
        wants_info = kwargs.pop("output_loading_info", False)
        may_resize = kwargs.pop("ignore_mismatched_sizes", False)
        key_mapping = {**_STRIP, **(kwargs.pop("key_mapping", None) or {})}
        model, info = super().from_pretrained(  # type: ignore[misc]
            source,
            *args,
            key_mapping=key_mapping,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # so that the info lists them; checked below
            **kwargs,
        )
        _refuse_other_weights(model, source, info, may_resize)
        # Version 5 would undo `_STRIP` when it saves, but `save_pretrained` adds the suffix itself.
        conversions = getattr(model, "_weight_conversions", None) or []
        kept = [x for x in conversions if not set(x.source_patterns) & set(_STRIP)]
        if len(kept) < len(conversions):
            model._weight_conversions = kept
        return (model, info) if wants_info else model

    def load_state_dict(self, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load weights, such as those of a saved folder.

        Raises:
            UserError: the weights were trained with other positions.
        """
        state_dict = {name.removesuffix(_SUFFIX): value for name, value in state_dict.items()}
        # The hook in `record.py` compares weights with a record of positions. Without it, those
        # that fill all but the positions are of a stock model; others may be a part of a model.
        if not any(map(is_identity, state_dict)):
            ours = self.state_dict()  # type: ignore[attr-defined]
            if all(name in state_dict or is_of_positions(name) for name in ours):
                raise UserError(
                    "these are the weights of a model whose positions were not set, and the model "
                    f"has {getattr(self.config, SPEC_FIELD)}: load them before set_positions"
                )
        return super().load_state_dict(state_dict, *args, **kwargs)  # type: ignore[misc]

    def load_adapter(self, peft_model_id: str | None = None, *args: Any, **kwargs: Any) -> Any:
        """Load a LoRA adapter beside the model's weights, as transformers does."""
        weights = kwargs.get("adapter_state_dict")
        if weights is None and peft_model_id is not None:
            weights = read_adapter(peft_model_id, kwargs)
        if weights is not None:
            kwargs["adapter_state_dict"] = weights = dict(weights)
            pop_adapter_records(cast(PreTrainedModel, self), weights)
        return super().load_adapter(peft_model_id, *args, **kwargs)  # type: ignore[misc]


def _refuse_other_weights(model: Any, source: Any, info: dict[str, Any], may_resize: bool) -> None:
    """Refuse weights whose parameters of positions are not those of the model.

    Args:
        model: the loaded model.
        source: source of the weights.
        info: transformers' report on differences of names and shapes.
        may_resize: whether weights other than those of positions may have different shapes.
    """
    # The info has names, or tuples of a name and two shapes.
    misshapen = [key if isinstance(key, str) else key[0] for key in info["mismatched_keys"]]
    problems = {
        "lack": filter(is_of_positions, info["missing_keys"]),
        "also have": filter(is_of_positions, info["unexpected_keys"]),
        "have other shapes of": (
            name for name in misshapen if not may_resize or is_of_positions(name)
        ),
    }
    for problem, names in problems.items():
        if listed := ", ".join(sorted(names)):
            raise UserError(
                f"{source}: the weights {problem} {shortened(listed)}, and its config.json says "
                f"{SPEC_FIELD}={model.config.position_encoding} for "
                f"{model.config.position_encoding_max_positions} tokens"
            )


AutoConfig.register(MODEL_TYPE, PositionsConfig, exist_ok=True)
