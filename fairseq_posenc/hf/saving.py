"""Saves and loads models whose positions were set.

A folder has the spec in its configuration, with all options, and all weights. transformers' Auto
classes load it once ``fairseq_posenc.hf`` is imported, or by ``trust_remote_code=True``, for which
the folder has a small loader.

Nothing loads it as the stock model, whose positions are different. Auto classes do not know its
model type, and stock classes do not know its attention function. In the file of weights, the record
of positions has the name of a weight of the stock model (:func:`_exchange_names`): its shape does
not fit, so that loaders of weights alone stop as well.
"""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any, cast

import transformers
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from fairseq_posenc.errors import UserError, shortened
from fairseq_posenc.hf.attention import OUR_ATTENTION, POSITIONS
from fairseq_posenc.hf.cards import LOADER, TAG, write_card, write_loader
from fairseq_posenc.hf.derived import Derived, add_mixin, derive
from fairseq_posenc.hf.families import FAMILIES
from fairseq_posenc.hf.folder_checks import check_folder, check_loaded, readable_errors
from fairseq_posenc.hf.record import compare_adapter, is_of_positions, set_saved
from fairseq_posenc.hf.replacing import replace_positions
from fairseq_posenc.hf.settings import LENGTH_FIELD, SPEC_FIELD, PositionSettings
from fairseq_posenc.identity import STATE_KEY, is_identity
from fairseq_posenc.specs import parse

MODEL_TYPE = "fairseq_posenc.hf"  # of folders; where it is unknown, errors of transformers quote it
_STOCK_TYPE = "base_model_type"  # key of the model type without positions, in config.json
_CLASS_PREFIX = "fairseq_posenc.hf."  # of the classes in `architectures`: they are no stock classes
_ATTENTION = "attn_implementation"  # key of the attention function, in config.json
_SPECS = (SPEC_FIELD, f"{SPEC_FIELD}_decoder")
_SUFFIX = ".fairseq_posenc"  # of the weights whose names the records have, in the file of weights
_RECORD = f"{POSITIONS}.{STATE_KEY}"  # a stack's record of its positions
# TRL, for example, reloads the model from this name as the reference; an error then quotes it.
_NO_FOLDER = (
    "a model whose positions were set: save it and load it from its folder, or pass what was to be "
    "loaded by this name (ref_model, processing_class)"
)
_HEADS = (
    *("", "ForCausalLM", "ForMaskedLM", "ForMultipleChoice", "ForNextSentencePrediction"),
    *("ForPreTraining", "ForQuestionAnswering", "ForSeq2SeqLM", "ForSequenceClassification"),
    *("ForSpeechSeq2Seq", "ForTextEncoding", "ForTokenClassification"),
)
_AUTO_CLASSES: list[Any] = [getattr(transformers, f"AutoModel{head}") for head in _HEADS]


def make_saveable(model: PreTrainedModel) -> None:
    """Make a model save and load its positions: it and its configuration get derived classes."""
    if not isinstance(model.config, _ConfigWithPositions):
        stock: Any = type(model.config)
        model.config.__class__ = _derive_and_register(stock)
    if not isinstance(model, _ModelWithPositions):
        add_mixin(model, _ModelWithPositions)
        model.add_model_tags(TAG)
    model.config._name_or_path = _NO_FOLDER
    model.name_or_path = ""  # which PEFT writes to adapters: their base model is in no folder


def load_model(folder: Path, **settings: Any) -> PreTrainedModel:
    """Load the model of a folder, stock or with positions, as the class that the folder names.

    Args:
        folder: folder of transformers, perhaps somebody else's.
        settings: options of ``from_pretrained``.

    Raises:
        UserError: the folder is refused or cannot be read, or no Auto class has its class.
    """
    identities = check_folder(folder)
    transformers.logging.set_verbosity_error()  # what it would report about weights is an error
    with readable_errors(folder):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        name = str(next(iter(config.architectures or ()), "")).removeprefix(_CLASS_PREFIX)
        if (auto := _find_auto_class(type(config), name)) is None:
            raise UserError(
                f"its config.json names the class {shortened(name)}, which is not a model of text "
                f"of type {shortened(str(config.model_type))!r}"
            )
        model, info = auto.from_pretrained(
            folder,
            config=config,
            trust_remote_code=False,
            disable_mmap=True,  # a mapped file that is written ends the process (SIGBUS)
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # so that the info lists them; checked below
            **settings,
        )
        check_loaded(model, info, identities)
    return cast(PreTrainedModel, model)


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a folder; refuse one that runs code or cannot be read."""
    if not any(re.match("tokenizer|vocab|spiece|sentencepiece", x.name) for x in folder.iterdir()):
        raise UserError(f"{folder}: has no tokenizer, which --text needs: save the model's there")
    with readable_errors(folder, "its tokenizer, which --text needs,"):
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    return cast(PreTrainedTokenizerBase, tokenizer)


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
    """Derive a configuration class with positions from a stock class, and register its models."""
    derived = _make_config_class(stock)
    for auto in _AUTO_CLASSES:
        if stock in auto._model_mapping:
            auto.register(
                derived, derive(auto._model_mapping[stock], (_ModelWithPositions,)), exist_ok=True
            )
    return derived


@cache
def _make_config_class(stock: Any) -> Any:
    # The class has a different name and module from the stock class: Auto classes find stock
    # configurations by their names, and in transformers 5.14 to 5.23 they do not register a
    # configuration whose module is transformers'.
    name = f"{stock.__name__}WithPositions"
    return type(name, (_ConfigWithPositions, stock), {"stock": stock})


def _make_empty_config(stock: type) -> Any:
    """Create an empty configuration of a derived class, for pickle to fill."""
    derived = _derive_and_register(stock)
    return derived.__new__(derived)


class _ConfigWithPositions:
    """The part of a configuration with positions that its stock class lacks."""

    stock: type

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _make_empty_config, (self.stock,), self.__dict__

    def to_json_string(self, use_diff: bool = True) -> str:
        """Write the configuration with the changes that keep stock classes from reading it."""
        stock = json.loads(super().to_json_string(use_diff))  # type: ignore[misc]
        classes = [name.removeprefix(_CLASS_PREFIX) for name in stock.get("architectures") or ()]
        content = {
            **stock,
            "model_type": MODEL_TYPE,
            _STOCK_TYPE: stock["model_type"],
            **{key: parse(stock[key]).full() for key in _SPECS if key in stock},
            _ATTENTION: OUR_ATTENTION,
            "architectures": [_CLASS_PREFIX + name for name in classes],
            "auto_map": {"AutoConfig": f"{LOADER}.{PositionsConfig.__name__}"},
        }
        return json.dumps(content, indent=2, sort_keys=True) + "\n"

    def save_pretrained(self, save_directory: Any, **kwargs: Any) -> None:
        """Save the configuration as transformers does, with the loader."""
        super().save_pretrained(save_directory, **kwargs)  # type: ignore[misc]
        write_loader(Path(save_directory))

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
        """Build the configuration of the stock model with positions."""
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
    content.pop(_ATTENTION, None)
    spec = content.get(SPEC_FIELD)
    length = content.get(LENGTH_FIELD)
    if not isinstance(spec, str) or not isinstance(length, int) or length < 1:
        raise UserError(
            f"config.json: {SPEC_FIELD} must be a spec and {LENGTH_FIELD} a number of at least 1, "
            f"not {shortened(repr(spec))} and {shortened(repr(length))}"
        )
    return content | {key: str(parse(content[key])) for key in _SPECS if key in content}


class _ModelWithPositions(Derived):
    """The part of a model with positions that its stock class, here ``super()``, lacks."""

    config: PretrainedConfig
    saves_positions = True

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
        """Save the model as transformers does, with the records in the place of stock weights."""
        if kwargs.get("distributed_checkpoint"):
            raise UserError("distributed_checkpoint=True does not record positions: leave it out")
        # A model with adapters saves only these, under PEFT's names.
        is_whole = not getattr(self, "_hf_peft_config_loaded", False)
        if is_whole:
            weights = self.state_dict() if state_dict is None else state_dict  # type: ignore[attr-defined]
            state_dict = _exchange_names(weights, self.config, saving=True)
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

    def _card_fields(self) -> dict[str, str]:
        name, config = type(self).__name__, self.config
        auto = _find_auto_class(type(config), name) or transformers.AutoModel
        spec, length = (str(getattr(config, field)) for field in (SPEC_FIELD, LENGTH_FIELD))
        names = {"class_name": name, "auto_class": auto.__name__}
        return {**names, "spec": spec, "length": length}

    @classmethod
    def from_pretrained(cls, source: Any, *args: Any, **kwargs: Any) -> Any:
        """Load a model from a folder; refuse weights of other positions than its config.json's."""
        wants_info = kwargs.pop("output_loading_info", False)
        may_resize = kwargs.pop("ignore_mismatched_sizes", False)
        if kwargs.get(_ATTENTION) == OUR_ATTENTION:  # another model's, as TRL passes it on
            del kwargs[_ATTENTION]
        pattern = _stock_name_of_record(cls.config_class)  # type: ignore[attr-defined]
        ours = {f"^{pattern}$": rf"\1{_RECORD}", rf"^(.+){re.escape(_SUFFIX)}$": r"\1"}
        model, info = super().from_pretrained(  # type: ignore[misc]
            source,
            *args,
            key_mapping={**ours, **(kwargs.pop("key_mapping", None) or {})},
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # so that the info lists them; checked below
            **kwargs,
        )
        _refuse_other_weights(model, source, info, may_resize)
        # transformers would undo `ours` when it saves; `save_pretrained` renames weights itself.
        conversions = getattr(model, "_weight_conversions", None) or []
        kept = [x for x in conversions if not set(x.source_patterns) & set(ours)]
        if len(kept) < len(conversions):
            model._weight_conversions = kept
        return (model, info) if wants_info else model

    def load_state_dict(self, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load weights, such as those of a saved folder; refuse those of other positions."""
        state_dict = _exchange_names(state_dict, self.config, saving=False)
        # Weights without a record of positions that fill all but these are of a stock model;
        # others may be a part of a model.
        ours = self.state_dict()  # type: ignore[attr-defined]
        if not any(map(is_identity, state_dict)) and all(
            name in state_dict or is_of_positions(name) for name in ours
        ):
            raise UserError(
                "these are the weights of a model whose positions were not set, and the model has "
                f"{getattr(self.config, SPEC_FIELD)}: load them before set_positions"
            )
        return super().load_state_dict(state_dict, *args, **kwargs)  # type: ignore[misc]

    def load_adapter(self, peft_model_id: str | None = None, *args: Any, **kwargs: Any) -> Any:
        """Load an adapter of PEFT beside the model's weights, as transformers does."""
        compare_adapter(cast(PreTrainedModel, self), peft_model_id, kwargs)
        return super().load_adapter(peft_model_id, *args, **kwargs)  # type: ignore[misc]


def _stock_name_of_record(config_class: Any) -> str:
    """Write a pattern of the weight whose name a stack's record has in a file of weights.

    It is the first projection of the first layer's attention, which every stack has. The first
    group of the pattern is the name of the stack.
    """
    types = [getattr(cls, "model_type", "") for cls in config_class.__mro__]
    family = next(FAMILIES[name] for name in types if name in FAMILIES)
    names = family.projections
    name = names if isinstance(names, str) else names[0]
    return "(.*)" + re.escape(f"{family.layers}.0.{family.attention}.{name}.weight")


def _exchange_names(
    weights: dict[str, Any], config: PretrainedConfig, *, saving: bool
) -> dict[str, Any]:
    """Give the record of each stack the name of a stock weight and this a suffix, or undo it."""
    pattern = re.compile(_stock_name_of_record(type(config)))
    exchanged = dict(weights)
    for name in weights:
        if match := pattern.fullmatch(name):
            records, suffixed = match[1] + _RECORD, name + _SUFFIX
            if saving and records in weights:
                exchanged[name], exchanged[suffixed] = exchanged.pop(records), weights[name]
            if not saving and suffixed in weights:
                exchanged[name], exchanged[records] = exchanged.pop(suffixed), weights[name]
    return exchanged


def _refuse_other_weights(model: Any, source: Any, info: dict[str, Any], may_resize: bool) -> None:
    """Refuse weights whose parameters of positions are not those of the model.

    ``may_resize`` allows other shapes of other weights, which transformers' ``info`` lists, too.
    """
    misshapen = [key if isinstance(key, str) else key[0] for key in info["mismatched_keys"]]
    problems = {
        "lack": filter(is_of_positions, info["missing_keys"]),
        "also have": filter(is_of_positions, info["unexpected_keys"]),
        "have other shapes of": [x for x in misshapen if not may_resize or is_of_positions(x)],
    }
    for problem, names in problems.items():
        if listed := ", ".join(sorted(names)):
            spec, length = (getattr(model.config, field) for field in (SPEC_FIELD, LENGTH_FIELD))
            raise UserError(
                f"{source}: the weights {problem} {shortened(listed)}, and its config.json says "
                f"{SPEC_FIELD}={spec} for {length} tokens"
            )


AutoConfig.register(MODEL_TYPE, PositionsConfig, exist_ok=True)
