"""Makes architectures, which set fairseq's options of a model, for families that use argparse."""

from collections.abc import Callable
from typing import Any

from fairseq_posenc.host.checks import forget_tpu

Architecture = Callable[[Any], None]  # sets the options of fairseq that were not given


def make_architecture(set_size: Architecture, **defaults: Any) -> Architecture:
    """Make an architecture that sets ``defaults``, then those of ``set_size`` for what is left."""

    def set_defaults(args: Any) -> None:
        forget_tpu(args)  # architectures are our first code after fairseq chose a TPU for --bf16
        for option, default in defaults.items():
            setattr(args, option, getattr(args, option, default))
        set_size(args)

    return set_defaults
