"""The trained model that a start is made from: any of fairseq's RoBERTas, or ours."""

from __future__ import annotations

import warnings
from argparse import Namespace
from pathlib import Path
from typing import Any, NamedTuple

from fairseq import checkpoint_utils
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY
from fairseq.models.roberta import RobertaModel
from torch import Tensor

from fairseq_posenc.checkpoints import STOCK_OFFSET
from fairseq_posenc.errors import UserError, one_line
from fairseq_posenc.models.base import plain_args
from fairseq_posenc.options import resolve
from fairseq_posenc.registry import Spec, parse

SIZES = (
    "encoder_layers",
    "encoder_embed_dim",
    "encoder_ffn_embed_dim",
    "encoder_attention_heads",
)
STOCK_TABLE = ".embed_positions.weight"


class Source(NamedTuple):
    """A trained model.

    Attributes:
        path: its checkpoint.
        settings: fairseq's configuration of its training.
        args: its model options, complete.
        arch: its architecture.
        spec: its position encodings.
        max_positions: the positions of its tables.
        weights: its parameters by name, as the file has them.
    """

    path: Path
    settings: Any
    args: Namespace
    arch: str
    spec: Spec
    max_positions: int
    weights: dict[str, Tensor]

    @property
    def symbols(self) -> int:
        """The size of its dictionary, with ``<mask>``."""
        name = next(name for name in self.weights if name.endswith(".embed_tokens.weight"))
        return self.weights[name].size(0)


def read(path: Path) -> Source:
    """Read a checkpoint.

    Raises:
        UserError: no such file, no checkpoint of fairseq, or no RoBERTa.
    """
    if not path.is_file():
        raise UserError(f"--from {path}: no such file")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # hydra's, about fairseq's configuration
            state = checkpoint_utils.load_checkpoint_to_cpu(str(path))
        settings, weights = state["cfg"], state["model"]
        args = Namespace(**vars(plain_args(settings.model)))
    except Exception as error:  # what torch and fairseq raise depends on what the file holds
        reason = one_line(error) or f"not a whole checkpoint of fairseq ({type(error).__name__})"
        raise UserError(f"--from {path}: {reason}") from error
    arch = str(getattr(args, "_name", None) or getattr(args, "arch", None))
    if not issubclass(ARCH_MODEL_REGISTRY.get(arch, object), RobertaModel):
        raise UserError(f"--from {path}: a model of the architecture {arch}, not a RoBERTa")
    if not any(name.endswith(".embed_tokens.weight") for name in weights):
        raise UserError(f"--from {path}: holds no token embeddings")
    ARCH_CONFIG_REGISTRY[arch](args)  # old checkpoints lack options that came later
    positions = _max_positions(args, settings, weights)
    return Source(path, settings, args, arch, _spec(args), positions, weights)


def _spec(args: Namespace) -> Spec:
    """Return the position encodings; fairseq's own models say them by other options."""
    if hasattr(args, "position_encoding"):
        return resolve(args).encoder
    if getattr(args, "no_token_positional_embeddings", False):
        return parse("none")
    return parse("learned" if args.encoder_learned_pos else "sinusoidal(layout=fairseq)")


def _max_positions(args: Namespace, settings: Any, weights: dict[str, Tensor]) -> int:
    for name, value in weights.items():
        if name.endswith(STOCK_TABLE):
            return value.size(0) - STOCK_OFFSET
    return int(getattr(args, "max_positions", None) or settings.task.tokens_per_sample)
