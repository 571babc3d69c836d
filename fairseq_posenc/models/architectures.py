"""Makes architectures: functions that set the options of a model which were not given."""

from collections.abc import Callable
from typing import Any

from fairseq_posenc.host.checks import forget_tpu


def make_architecture(set_size: Callable[[Any], None], **defaults: Any) -> Callable[[Any], None]:
    """Make an architecture that sets ``defaults``, then those of ``set_size`` for what is left."""

    def set_defaults(args: Any) -> None:
        forget_tpu(args)  # architectures are our first code after fairseq chose a TPU for --bf16
        for option, default in defaults.items():
            setattr(args, option, getattr(args, option, default))
        set_size(args)

    return set_defaults
