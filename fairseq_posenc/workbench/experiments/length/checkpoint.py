"""Causal language models as the user names them, ``NAME=MODEL[@SPEC]``, and once they are read.

A model is a checkpoint of fairseq, or a folder of Hugging Face's transformers. With ``@SPEC`` it is
read with other positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Optional

from torch import Tensor, nn

from fairseq_posenc.errors import UserError
from fairseq_posenc.specs import parse
from fairseq_posenc.workbench.running.hub import find_model
from fairseq_posenc.workbench.running.options import is_folder_name, parse_named

FORM = "NAME=MODEL or NAME=MODEL@SPEC"


class NamedCheckpoint(NamedTuple):
    """A model and what the user calls it."""

    name: str  # what the user calls it
    path: Path  # a checkpoint of fairseq, or a folder of transformers
    # position encodings to read it with, in place of those that it was trained with
    spec_override: Optional[str] = None

    @property
    def is_folder(self) -> bool:
        """Whether it is a folder of transformers."""
        return self.path.is_dir()


def parse_checkpoints(texts: Sequence[str]) -> list[NamedCheckpoint]:
    """Parse the models of the command line.

    Raises:
        UserError: malformed, two of the same name, a model that does not exist, or a bad spec.
    """
    return [_parse_checkpoint(*named) for named in parse_named(texts, FORM, "models").items()]


def _parse_checkpoint(name: str, value: str) -> NamedCheckpoint:
    if not is_folder_name(name):
        raise UserError(f"{name!r}: the name must be a valid folder name")
    path, at, spec = value.rpartition("@")
    if not at or Path(value).exists():
        path, spec = value, ""
    named = NamedCheckpoint(name, find_model(Path(path)), spec or None)
    if named.is_folder:
        if not (named.path / "config.json").is_file():
            raise UserError(f"{name}: the folder {path} has no config.json of transformers")
        return named
    if not named.path.is_file():
        raise UserError(f"{name}: the checkpoint {path} does not exist")
    return named._replace(spec_override=str(parse(spec)) if spec else None)


class LoadedModel(NamedTuple):
    """A model that is ready to score."""

    model: nn.Module  # in eval mode, on its device
    # computes the natural logarithms of the probabilities of the last tokens, `(B, n)`, from the
    # tokens before each of the last T, `(B, T)`, and the last n themselves, `(B, n)`
    predict: Callable[[Tensor, Tensor], Tensor]
    encoding: str  # its position encodings, as it was read, or whose model it is
    trained_length: int  # tokens in a training sample
    updates: Optional[int]  # training updates; None if the file does not tell
    # the longest input; None if the position encodings themselves refuse what they cannot
    limit: Optional[int]
