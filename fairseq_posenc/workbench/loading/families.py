"""Describes the three families of models, and builds a model from options, without data."""

import warnings
from argparse import Namespace
from collections.abc import Mapping, Sequence
from copy import deepcopy
from types import SimpleNamespace
from typing import Any, NamedTuple, Optional

from fairseq import options
from fairseq.data import Dictionary
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models import ARCH_MODEL_REGISTRY
from fairseq.models.roberta import RobertaModel
from fairseq.models.transformer import TransformerModel
from fairseq.models.transformer_lm import TransformerLanguageModel
from omegaconf import OmegaConf

from fairseq_posenc.models.causal_lm import PositionalLM
from fairseq_posenc.models.masked_lm import PositionalRoberta
from fairseq_posenc.models.translation import PositionalTransformer

# Ends of the names of other entries than weights: our record of positions, fairseq's version of a
# decoder, and a buffer that its sinusoids had.
NOT_WEIGHTS = ("._extra_state", ".version", "._float_tensor")


class TaskKind(NamedTuple):
    """A family of models."""

    name: str  # `masked_lm`, `causal_lm` or `translation`; `--family` has other words for them
    title: str  # name in messages
    model_class: Any  # of our models
    stock_class: Any  # of fairseq's, from which ours is derived
    task: str  # fairseq's name of the task
    stem: str  # beginning of architectures' names, which end with the name of an encoding
    length_options: dict[str, str]  # stack -> option for its number of positions


FAMILIES = (
    TaskKind(
        name="masked_lm",
        title="masked LM",
        model_class=PositionalRoberta,
        stock_class=RobertaModel,
        task="masked_lm",
        stem="roberta_",
        length_options={"encoder": "max_positions"},
    ),
    TaskKind(
        name="causal_lm",
        title="causal LM",
        model_class=PositionalLM,
        stock_class=TransformerLanguageModel,
        task="language_modeling",
        stem="transformer_lm_",
        length_options={"decoder": "max_target_positions"},
    ),
    TaskKind(
        name="translation",
        title="translation",
        model_class=PositionalTransformer,
        stock_class=TransformerModel,
        task="translation",
        stem="transformer_",
        length_options={"encoder": "max_source_positions", "decoder": "max_target_positions"},
    ),
)


def read_architecture(settings: Any) -> Optional[str]:
    """Read the name of the architecture in the settings of a model; None if they have none."""
    return getattr(settings, "_name", None) or getattr(settings, "arch", None)


def find_family(arch: Optional[str], stock: bool = False) -> Optional[TaskKind]:
    """Find the family of an architecture, if any; with ``stock`` also of fairseq's models."""
    cls = ARCH_MODEL_REGISTRY.get(arch, object)  # the model class; `object` is in no family
    for family in FAMILIES:
        if issubclass(cls, family.stock_class if stock else family.model_class):
            return family
    return None


def list_stacks(model: Any) -> list[tuple[str, Any]]:
    """List the stacks of a model with their names, ``encoder`` and ``decoder``."""
    return [
        (side, getattr(stack, "sentence_encoder", stack))  # RoBERTa's encoder contains its stack
        for side in ("encoder", "decoder")
        if (stack := getattr(model, side, None)) is not None
    ]


def build_default_settings(arch: str, task: str) -> dict[str, Any]:
    """Build fairseq's default configuration of a training, as a dictionary of sections.

    The section ``model`` is a dictionary if the model has a dataclass, else a Namespace.
    """
    data_folder = "."  # required by fairseq, but not read
    words = [data_folder, "--task", task, "--arch", arch]
    if task == "translation":
        words += ["--source-lang", "src", "--target-lang", "tgt"]
    args = options.parse_args_and_arch(options.get_training_parser(task), words)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # hydra warns about fairseq's configuration
        config = convert_namespace_to_omegaconf(args)
    values: Any = OmegaConf.to_container(config, resolve=True, enum_to_str=True)
    return dict(values)


def build_model(
    values: dict[str, Any], dictionaries: Sequence[Dictionary], task_options: Mapping[str, Any]
) -> Any:
    """Build a model with new parameters.

    Args:
        values: all options of the model; ``_name`` is its architecture.
        dictionaries: those of its text, the source's first.
        task_options: options of its task.
    """
    task = SimpleNamespace(  # all that models read of a task while they are built
        source_dictionary=dictionaries[0],
        target_dictionary=dictionaries[-1],  # the source's where there is only one
        cfg=Namespace(**task_options),
    )
    args = Namespace(**deepcopy(values))  # a copy, because fairseq changes it
    return ARCH_MODEL_REGISTRY[values["_name"]].build_model(args, task)
