"""Explains errors of fairseq that a user can fix, and divergence, in one line each.

The hook for exceptions (:mod:`~fairseq_posenc.host.startup`) prints the line.
"""

import re
import weakref
from pathlib import Path

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from fairseq_posenc.checkpoints.dictionary import DICTIONARY, check_text_kind
from fairseq_posenc.checkpoints.state_dict_adapter import PositionCheckpoints
from fairseq_posenc.errors import UserError, chain, shortened

# The model that this process trains, if it still lives, and the folder of its checkpoints.
_training: tuple[weakref.ref[PositionCheckpoints], str] | None = None
_STOPPED = re.compile(r"training stopped at update ([\d,]+): ")
_SIZE = re.compile(r"Size of sample #(\d+) is invalid \(=(.+?)\) since max_positions=(.+?), skip")
# What to do about errors of fairseq, by how they begin.
_ADVICE = {
    "The dataset is empty": "no batch is left of a split: fairseq drops what does not fill a "
    "multiple of 8 samples; give --required-batch-size-multiple 1 (or more --max-tokens)",
    "Must specify batch size": "give --max-tokens, the tokens of a batch, or --batch-size",
    "Could not infer language pair": "the task reads pairs: no SPLIT.SRC-TGT.SRC.bin here",
    r"world size is \d+ but": "--distributed-world-size is more than the GPUs that torch sees: "
    "give as many as there are, or all options of docs/cluster.md for processes without GPUs",
}


def watch(model: PositionCheckpoints, save_dir: str) -> None:
    """Keep the model that is trained, whose update the line names."""
    global _training
    _training = weakref.ref(model), save_dir


def explain_divergence(error: BaseException) -> str | None:
    """Explain a :class:`FloatingPointError` of fairseq's trainer; None for any other error.

    fairseq has logged the layers whose outputs are NaN or infinite.
    """
    divergence = next((link for link in chain(error) if isinstance(link, FloatingPointError)), None)
    if divergence is None or _training is None or (model := _training[0]()) is None:
        return None
    update = model.num_updates + 1
    return (
        f"training stopped at update {update:,}: {divergence}; the checkpoints "
        f"in {_training[1]}, except crash.pt, are from before: continue from "
        "one of them with a smaller --lr, or with --clip-norm"
    )


def parse_stop_update(message: str) -> int:
    """Parse the update from a message of :func:`explain_divergence`; 0 for another message."""
    match = _STOPPED.search(message)
    return int(match[1].replace(",", "")) if match else 0


def explain_failure(error: BaseException) -> str | None:
    """Explain the first known error in an exception's chain; None if none is known."""
    if isinstance(error, KeyboardInterrupt):
        return "stopped; the same command goes on from its last checkpoint, if it has written one"
    explanations = (_explain_size, _explain_setting, _explain_text, _explain_absence)
    found = (explain(link) for link in chain(error) for explain in explanations)
    return next(filter(None, found), None)


def _explain_size(error: BaseException) -> str | None:
    if not (match := _SIZE.match(str(error))):
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
    """Explain missing data, for which fairseq looks before it builds a model."""
    if not isinstance(error, FileNotFoundError):
        return None
    if str(error).startswith("Dataset not found"):
        missing = str(error).partition(": ")[2]
        return f"the data have no split {missing}: name their folder, and a split that is there"
    if not error.filename:
        return None
    path = Path(error.filename)
    folder = path.parent if path.match("dict*.txt") else path
    if not folder.exists():
        return f"there is no folder {folder}: correct its name, or make it"
    try:
        check_text_kind(folder, pairs=path.name != DICTIONARY)
    except UserError as mistake:
        return str(mistake)
    return f"there is no file {path}"


def _explain_text(error: BaseException) -> str | None:
    """Explain an error of ``_ADVICE``, or the choice of a TPU by an architecture of fairseq."""
    is_tpu = "torch_xla" in str(error) or "xla_device" in str(error)
    if isinstance(error, (ImportError, AttributeError)) and is_tpu:
        return (
            "fairseq takes --bf16 on the command line for a TPU, and torch_xla is not installed: "
            "fairseq-hydra-train with common.bf16=true trains on GPUs"
        )
    return next((advice for start, advice in _ADVICE.items() if re.match(start, str(error))), None)
