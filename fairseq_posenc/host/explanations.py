"""Explains errors of fairseq that a user can fix, in one line each."""

import re
import traceback

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from fairseq_posenc.checkpoints.faults import locate
from fairseq_posenc.errors import chain, shortened

_SIZE = re.compile(r"Size of sample #(\d+) is invalid \(=(.+?)\) since max_positions=(.+?), skip")


def explain_failure(error: BaseException) -> str | None:
    """Explain the first known error in an exception's chain; None if none is known."""
    for link in chain(error):
        for explain in (_explain_size, _explain_setting, _explain_absence, _explain_launch):
            if message := explain(link):
                return message
    return None


def _explain_size(error: BaseException) -> str | None:
    match = _SIZE.match(str(error))
    if not match:
        return None
    return (
        f"sample {match[1]} has {match[2]} tokens, and the model reads {match[3]}: give it more "
        "positions, or leave such samples out by --skip-invalid-size-inputs-valid-test (the log "
        "then counts them)"
    )


def _explain_setting(error: BaseException) -> str | None:
    if isinstance(error, HydraException):
        return shortened(" ".join(str(error).partition("Config search path")[0].split()))
    if not isinstance(error, OmegaConfBaseException):
        return None
    name = error.full_key or error.key
    reason = shortened(" ".join(str(error).splitlines()[0].split()))
    return f"the setting {name}: {reason}" if name else reason


def _explain_absence(error: BaseException) -> str | None:
    """Explain a missing file of the data, or package for a TPU.

    The choice of a TPU is undone for this package's architectures, but not for fairseq's own.
    """
    if isinstance(error, FileNotFoundError) and (
        any(file == "data/dictionary.py" for file, _ in _list_functions(error))
        or str(error).startswith("Dataset not found")
    ):
        path = error.filename or str(error).partition(": ")[2]
        return f"the data have no {path}: name their folder, and a part that is there"
    is_tpu = "torch_xla" in str(error) or "xla_device" in str(error)
    if isinstance(error, (ImportError, AttributeError)) and is_tpu:
        return (
            "fairseq takes --bf16 on the command line for a TPU, and torch_xla is not installed: "
            "fairseq-hydra-train with common.bf16=true trains on GPUs"
        )
    return None


def _explain_launch(error: BaseException) -> str | None:
    """Explain the assertion by which fairseq fails when there are fewer GPUs than processes."""
    place = ("distributed/utils.py", "_infer_single_node_init")
    if isinstance(error, AssertionError) and place in _list_functions(error):
        return (
            "--distributed-world-size is more than the GPUs that torch sees: give as many as there "
            "are, or all options of docs/cluster.md for processes without GPUs"
        )
    return None


def _list_functions(error: BaseException) -> list[tuple[str, str]]:
    """List the functions that an error passed through, each with its file (:func:`locate`)."""
    return [locate(frame) for frame, _ in traceback.walk_tb(error.__traceback__)]
