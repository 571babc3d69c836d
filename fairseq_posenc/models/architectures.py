"""Makes architectures: functions that set the options of a model which were not given."""

from collections.abc import Callable
from typing import Any

from fairseq_posenc.host.checks import use_gpu_for_bf16


def make_architecture(set_size: Callable[[Any], None], **defaults: Any) -> Callable[[Any], None]:
    """Make an architecture that sets missing options: to ``defaults``, others by ``set_size``."""

    def set_defaults(args: Any) -> None:
        use_gpu_for_bf16(args)  # fairseq has chosen a TPU if --bf16 is given
        for option, default in defaults.items():
            setattr(args, option, getattr(args, option, default))
        set_size(args)

    return set_defaults
