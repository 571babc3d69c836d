"""The three families of models, and how one is built of options alone, without data."""

from __future__ import annotations

import warnings
from argparse import Action, ArgumentParser, Namespace
from copy import deepcopy
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple, Optional

from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models import ARCH_MODEL_REGISTRY
from fairseq.models.roberta import RobertaModel
from fairseq.models.transformer import TransformerModel
from fairseq.models.transformer_lm import TransformerLanguageModel
from omegaconf import OmegaConf

from fairseq_posenc.checkpoints.dictionary import Placeholders
from fairseq_posenc.models.causal_lm import PositionalLM
from fairseq_posenc.models.masked_lm import PositionalRoberta
from fairseq_posenc.models.translation import PositionalTransformer
from fairseq_posenc.workbench.running import host  # noqa: F401  (registers models and tasks)

NO_WEIGHTS = ("._extra_state", ".version", "._float_tensor")


class Family(NamedTuple):
    """A family of models."""

    name: str  # `masked_lm`, `causal_lm` or `translation`
    title: str  # name in a sentence
    kind: Any  # class of its models
    stock: Any  # fairseq's class that it derives from
    task: str  # fairseq's name of its task
    stem: str  # beginning of the names of its architectures, which end with an encoding's
    positions: dict[str, str]  # option for the number of positions, by stack


FAMILIES = (
    Family(
        *("masked_lm", "masked LM", PositionalRoberta, RobertaModel, "masked_lm", "roberta_"),
        {"encoder": "max_positions"},
    ),
    Family(
        *("causal_lm", "causal LM", PositionalLM, TransformerLanguageModel, "language_modeling"),
        *("transformer_lm_", {"decoder": "max_target_positions"}),
    ),
    Family(
        *("translation", "translation", PositionalTransformer, TransformerModel),
        *("translation", "transformer_"),
        {"encoder": "max_source_positions", "decoder": "max_target_positions"},
    ),
)


def architecture(settings: Any) -> str:
    """Read the name of an architecture off the settings of a model."""
    return str(getattr(settings, "_name", None) or getattr(settings, "arch", None))


def find_family(arch: str, stock: bool = False) -> Optional[Family]:
    """Find the family of an architecture, if any; with ``stock`` also of fairseq's own."""
    kind = ARCH_MODEL_REGISTRY.get(arch, object)
    return next((f for f in FAMILIES if issubclass(kind, f.stock if stock else f.kind)), None)


def list_stacks(model: Any) -> list[tuple[str, Any]]:
    """List encoder and decoder of a model, by these names."""
    stacks = [(side, getattr(model, side, None)) for side in ("encoder", "decoder")]
    return [
        (side, getattr(stack, "sentence_encoder", stack))
        for side, stack in stacks
        if stack is not None
    ]


def defaults(arch: str, task: str) -> dict[str, Any]:
    """Build fairseq's configuration of a training, plain, with defaults everywhere.

    That of the model is a dictionary for the families that have a dataclass, else a namespace.
    """
    return dict(_build_defaults(arch, task))


@cache
def _build_defaults(arch: str, task: str) -> dict[str, Any]:
    words = [".", "--task", task, "--arch", arch]
    if task == "translation":
        words += ["--source-lang", "src", "--target-lang", "tgt"]
    args = options.parse_args_and_arch(options.get_training_parser(task), words)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # hydra's, about fairseq's configuration
        config = convert_namespace_to_omegaconf(args)
    values: Any = OmegaConf.to_container(config, resolve=True, enum_to_str=True)
    return values


def model_options(arch: str) -> list[Action]:
    """List the options of an architecture's model on fairseq's command line."""
    parser = ArgumentParser(allow_abbrev=False, add_help=False)
    ARCH_MODEL_REGISTRY[arch].add_args(parser)
    return parser._actions


def build(values: dict[str, Any], symbols: list[int]) -> Any:
    """Build a model of complete options for dictionaries of these sizes; draw its parameters."""
    dictionaries = [Placeholders(size) for size in symbols]
    task = SimpleNamespace(
        source_dictionary=dictionaries[0],
        target_dictionary=dictionaries[-1],
        max_positions=lambda: values["max_positions"],
    )
    return ARCH_MODEL_REGISTRY[values["_name"]].build_model(Namespace(**deepcopy(values)), task)
