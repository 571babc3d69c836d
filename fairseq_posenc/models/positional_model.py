"""Defines what the three model families share: the base of their models, and their defaults."""

from collections.abc import Callable
from typing import Any

from fairseq_posenc.checkpoints.state_dict_adapter import PositionCheckpoints
from fairseq_posenc.host.checks import forget_tpu
from fairseq_posenc.host.preparation import prepare_command
from fairseq_posenc.transformer.options import log_encodings

Architecture = Callable[[Any], None]  # sets the options of fairseq that were not given


class PositionalModel(PositionCheckpoints):
    """Mixin for models, which call :meth:`use_stacks` at the end of ``build_model``."""

    def use_stacks(self, task: Any, **stacks: Any) -> None:
        """Log the encodings; check and prepare the command (data, lock, resumption) that runs."""
        for stack in stacks.values():
            self.init_positions = stack.cfg.position.init_positions  # equal in all; for loading
        log_encodings(**stacks)
        prepare_command(self, task, [stack.spec for stack in stacks.values()])


def make_architecture(set_size: Architecture, **defaults: Any) -> Architecture:
    """Make an architecture that sets ``defaults``, then those of ``set_size`` for what is left."""

    def set_defaults(args: Any) -> None:
        forget_tpu(args)  # architectures are our first code after fairseq chose a TPU for --bf16
        for option, default in defaults.items():
            setattr(args, option, getattr(args, option, default))
        set_size(args)

    return set_defaults
