"""Configuration and start-up line of all three families."""

from __future__ import annotations

import logging
from argparse import Namespace
from itertools import groupby
from typing import Any

from fairseq import utils
from fairseq.models.transformer import TransformerConfig
from omegaconf import OmegaConf

from fairseq_posenc.checkpoints.state_dict_adapter import is_position_parameter
from fairseq_posenc.errors import UserError
from fairseq_posenc.transformer.options import resolve

logger = logging.getLogger(__name__)


def plain_args(args: Any) -> Any:
    """Convert hydra's ``args``, whose unknown keys fairseq would drop, to a namespace."""
    if not OmegaConf.is_config(args):
        return args
    values: Any = OmegaConf.to_container(args, resolve=True)
    return Namespace(**values)


def stack_config(args: Any) -> TransformerConfig:
    """Build fairseq's configuration of a stack, with our options, parsed, as ``position``.

    Raises:
        UserError: an option that cannot be read.
    """
    plain = plain_args(args)
    check_activations(plain)
    config = TransformerConfig.from_namespace(plain)
    config.position = resolve(config)
    return config


def task_option(task: Any, name: str, default: Any = None) -> Any:
    """Read an option of a task, which fairseq's older tasks keep in another place."""
    options = getattr(task, "cfg", None) or getattr(task, "args", None)
    return getattr(options, name, default)


def check_activations(args: Any) -> None:
    """Refuse an activation function that fairseq does not know.

    The command line has a list of them; hydra's configurations are not checked against it.

    Raises:
        UserError: names the known ones.
    """
    for option in ("activation_fn", "pooler_activation_fn"):
        try:
            utils.get_activation_fn(name := getattr(args, option, None) or "relu")
        except RuntimeError:
            known = ", ".join(utils.get_available_activation_fns())
            flag = option.replace("_", "-")
            raise UserError(f"--{flag} {name} is none of fairseq's: {known}") from None


def announce(**stacks: Any) -> None:
    """Log the positions of each stack in one line."""
    for name, stack in stacks.items():
        runs = [(direction, len([*alike])) for direction, alike in groupby(stack.directions)]
        directions = " ".join(f"{direction} x{count}" for direction, count in runs)
        parameters = sum(
            value.numel()
            for key, value in stack.named_parameters()
            if is_position_parameter(f".{key}")
        )
        logger.info(
            f"{name} position encoding: {stack.assembly.spec} | directions: {directions} | "
            f"backend: {stack.backend} | position parameters: {parameters:,}"
        )
