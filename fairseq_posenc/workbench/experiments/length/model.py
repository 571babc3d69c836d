"""The models of ``lm-length``: parsed from ``NAME=MODEL[@SPEC]``, and opened.

A model is a checkpoint of fairseq, or a folder of Hugging Face's transformers. With ``@SPEC`` it
gets other positions than it was trained with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Optional

from torch import Tensor, nn

from fairseq_posenc.errors import UserError
from fairseq_posenc.specs import parse
from fairseq_posenc.workbench.running.files import find_model
from fairseq_posenc.workbench.running.options import is_folder_name, parse_named

FORM = "NAME=MODEL or NAME=MODEL@SPEC"


class NamedModel(NamedTuple):
    """A model that the user named."""

    name: str  # the user's name for it
    path: Path  # a checkpoint of fairseq, or a folder of transformers
    spec_override: Optional[str] = None  # replaces the trained positions; None keeps them

    @property
    def is_folder(self) -> bool:
        """Whether the model is a folder of transformers."""
        return self.path.is_dir()


def parse_models(texts: Sequence[str]) -> list[NamedModel]:
    """Parse the models of the command line; those of Hugging Face's hub are downloaded.

    Raises:
        UserError: an argument is malformed, two models have the same name, or a model does not
            exist.
    """
    return [_parse_model(*named) for named in parse_named(texts, FORM, "models").items()]


def _parse_model(name: str, value: str) -> NamedModel:
    if not is_folder_name(name):
        raise UserError(f"{name!r}: the name must be a valid folder name")
    path, _, spec = value.rpartition("@")
    if not path or Path(value).exists():  # there is no spec; a path may contain "@"
        path, spec = value, ""
    named = NamedModel(name, find_model(Path(path)), spec or None)
    if named.is_folder:
        if not (named.path / "config.json").is_file():
            raise UserError(f"{name}: the folder {path} has no config.json of transformers")
        return named  # `own` in its spec is understood only when the model is open
    if not named.path.is_file():
        raise UserError(f"{name}: the checkpoint {path} does not exist")
    return named._replace(spec_override=str(parse(spec)) if spec else None)


class LoadedModel(NamedTuple):
    """A model that has been opened."""

    model: nn.Module  # in eval mode, on its device
    # Computes natural logarithms of probabilities, `(B, n)`, from the inputs, `(B, T)`, and the
    # tokens that follow the last n of them, `(B, n)`.
    predict: Callable[[Tensor, Tensor], Tensor]
    encoding: str  # spec of its positions, or "fairseq's CLASS" for fairseq's own models
    trained_length: int  # tokens in a training sample
    updates: Optional[int]  # training updates; None if they are not known
    limit: Optional[int]  # longest input; None if the position encodings themselves refuse it
