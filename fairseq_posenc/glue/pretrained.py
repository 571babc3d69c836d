"""The pre-trained model: what has to be the same in fine-tuning, read from its checkpoint."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, NamedTuple

from fairseq import checkpoint_utils
from fairseq.data import Dictionary
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models import ARCH_MODEL_REGISTRY
from fairseq.models.roberta import RobertaModel

from fairseq_posenc.errors import UserError, one_line
from fairseq_posenc.glue.data import DataBin
from fairseq_posenc.models.masked_lm import PositionalRoberta
from fairseq_posenc.options import PositionConfig

# What makes the parameters, and what the model computes with them; dropout is not part of it.
_SETTINGS = (
    *("encoder_layers", "encoder_embed_dim", "encoder_ffn_embed_dim", "encoder_attention_heads"),
    *("activation_fn", "pooler_activation_fn", "encoder_normalize_before", "layernorm_embedding"),
    *("untie_weights_roberta", "position_encoding", "attention_directions"),
)
_EMBEDDING = "encoder.sentence_encoder.embed_tokens.weight"
_OLD_EMBEDDING = _EMBEDDING.replace("encoder.", "decoder.", 1)
_STOCK = "roberta_learned"  # what fairseq's own RoBERTa is here


class Pretrained(NamedTuple):
    """A pre-trained masked LM.

    Attributes:
        path: its checkpoint, absolute.
        architecture: name for ``model._name``.
        settings: of the model, by name.
        max_positions: the longest input.
        symbols: rows of its embedding.
        dictionary: of the data that it was trained on, where that was.
    """

    path: Path
    architecture: str
    settings: dict[str, Any]
    max_positions: int
    symbols: int
    dictionary: Path

    def check(self, data: DataBin) -> None:
        """Refuse data that the model cannot read.

        Raises:
            UserError: another dictionary, or examples that are too long.
        """
        if data.symbols + 1 != self.symbols:  # fairseq adds <mask>
            raise UserError(
                f"{data.path} has {data.symbols + 1:,} symbols and {self.path} {self.symbols:,}: "
                "make it with the --dict that the model was pre-trained with"
            )
        ours = data.path / "input0" / "dict.txt"
        if self.dictionary.is_file() and _symbols(self.dictionary) != _symbols(ours):
            raise UserError(
                f"{ours} and {self.dictionary}, which {self.path} was pre-trained with, have "
                "different symbols: make the data-bin with the latter as --dict"
            )
        if data.longest > self.max_positions:
            raise UserError(
                f"{data.path} has an example of {data.longest} tokens and {self.path} takes "
                f"{self.max_positions}: make it with --max-tokens {self.max_positions}"
            )


def read_pretrained(path: Path) -> Pretrained:
    """Read a checkpoint of a RoBERTa, of this package or of fairseq's own.

    Raises:
        UserError: it is not there, no checkpoint, or of another kind of model.
    """
    if not path.is_file():
        raise UserError(f"--checkpoint {path} is not there")
    try:
        state: dict[str, Any] = checkpoint_utils.load_checkpoint_to_cpu(str(path))
        args: argparse.Namespace | None = state.get("args")
        cfg = state["cfg"] if args is None else convert_namespace_to_omegaconf(args)
    except Exception as error:  # torch and pickle have many for a file that is no checkpoint
        reason = one_line(error) or f"not a checkpoint of fairseq ({type(error).__name__})"
        raise UserError(f"--checkpoint {path}: {reason}") from error
    model = cfg.model
    architecture = _get(model, "_name") or _get(model, "arch")
    kind = ARCH_MODEL_REGISTRY.get(architecture)
    if not (isinstance(kind, type) and issubclass(kind, RobertaModel)):
        raise UserError(
            f"--checkpoint {path} is of the architecture {architecture}: GLUE needs a masked LM, "
            "with an architecture roberta_... or decbert_..."
        )
    weights = state["model"]
    embedding = weights[_EMBEDDING if _EMBEDDING in weights else _OLD_EMBEDDING]
    settings = {name: _get(model, name) for name in _SETTINGS}
    if not issubclass(kind, PositionalRoberta):
        architecture = _STOCK
        settings["position_encoding"] = PositionConfig.position_encoding
    return Pretrained(
        path=path.resolve(),
        architecture=architecture,
        settings={name: value for name, value in settings.items() if value is not None},
        max_positions=int(_get(model, "max_positions") or cfg.task.tokens_per_sample),
        symbols=len(embedding),
        dictionary=Path(str(_get(cfg.task, "data")).split(":")[0], "dict.txt"),
    )


def _get(settings: Any, name: str) -> Any:
    return getattr(settings, name, None)


def _symbols(path: Path) -> list[str]:
    return list(Dictionary.load(str(path)).symbols)
