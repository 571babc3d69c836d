"""A trained RoBERTa that something starts from: what builds it again, and its dictionary."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any, NamedTuple, Optional

from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY
from fairseq.models.roberta import RobertaModel
from torch import Tensor

from fairseq_posenc.errors import UserError
from fairseq_posenc.models.masked_lm import PositionalRoberta
from fairseq_posenc.registry import Spec, parse
from fairseq_posenc.running.checkpoints import load_state
from fairseq_posenc.transformer.adapting import STOCK_OFFSET
from fairseq_posenc.transformer.configuration import plain_args
from fairseq_posenc.transformer.dictionary import DICTIONARY, load_dictionary
from fairseq_posenc.transformer.options import resolve

STOCK_TABLE = ".embed_positions.weight"
_EMBEDDINGS = ".embed_tokens.weight"
# About how a checkpoint is loaded, or a training made; not about what the model is.
_NOT_THE_MODEL = {
    *("help", "init_positions", "load_checkpoint_heads", "position_backend"),
    *("dropout", "attention_dropout", "activation_dropout", "pooler_dropout", "encoder_layerdrop"),
    *("checkpoint_activations", "offload_activations", "min_params_to_wrap"),
}


class Pretrained(NamedTuple):
    """A trained model: one of ours, or of fairseq's RoBERTas.

    Attributes:
        path: its checkpoint.
        settings: fairseq's configuration of its training.
        args: its model options, complete.
        arch: its architecture.
        spec: its position encodings.
        max_positions: the positions of its tables.
        symbols: the size of its dictionary, with ``<mask>``.
        dictionary: of the data that it was trained on, where that was; None if it does not tell.
        weights: its parameters by name, as the file has them; empty unless asked for.
    """

    path: Path
    settings: Any
    args: Namespace
    arch: str
    spec: Spec
    max_positions: int
    symbols: int
    dictionary: Optional[Path]
    weights: dict[str, Tensor]

    @property
    def directions(self) -> str:
        """What its layers see, as in ``lr,rl``; empty if all of them see both sides."""
        return str(getattr(self.args, "attention_directions", None) or "")

    @property
    def options(self) -> dict[str, Any]:
        """The model section of a configuration that builds it again, as one of ours."""
        ours = issubclass(ARCH_MODEL_REGISTRY[self.arch], PositionalRoberta)
        options = {
            **{name: getattr(self.args, name, None) for name in _model_options()},
            "_name": self.arch if ours else f"roberta_{self.spec.items[0].name}",
            "position_encoding": str(self.spec),
            "max_positions": self.max_positions,
        }
        return {name: value for name, value in options.items() if value is not None}

    def check_dictionary(self, path: Path) -> None:
        """Refuse tokens that mean something else to the model.

        A dictionary of the same size with other symbols is found out only if the one of the
        training is still there.

        Args:
            path: dictionary of the data that the model is to read.

        Raises:
            UserError: says how they differ.
        """
        ours = load_dictionary(path)
        advice = "make the data with the vocabulary of the pre-training"
        if len(ours) != self.symbols:
            raise UserError(
                f"{path} has {len(ours):,} symbols with <mask>, but {self.path} has "
                f"{self.symbols:,}; {advice}"
            )
        theirs = self.dictionary
        if theirs and theirs.is_file() and load_dictionary(theirs).symbols != ours.symbols:
            raise UserError(
                f"{path} has other symbols than {theirs}, which {self.path} was trained with; "
                f"{advice}"
            )


def read_pretrained(path: Path, option: str, with_weights: bool = False) -> Pretrained:
    """Read a model's checkpoint.

    Args:
        path: the file.
        option: that named it, for messages.
        with_weights: whether the parameters are wanted, too.

    Raises:
        UserError: no such file, no whole checkpoint, or no RoBERTa.
    """
    state = load_state(path, option)
    settings, weights = state["cfg"], state["model"]
    args = Namespace(**vars(plain_args(settings.model)))
    arch = str(getattr(args, "_name", None) or getattr(args, "arch", None))
    if not issubclass(ARCH_MODEL_REGISTRY.get(arch, object), RobertaModel):
        raise UserError(
            f"{option} {path}: a model of the architecture {arch}, not a RoBERTa (roberta_... or "
            "decbert_...)"
        )
    embeddings = [value for name, value in weights.items() if name.endswith(_EMBEDDINGS)]
    if not embeddings:
        raise UserError(f"{option} {path}: holds no token embeddings")
    ARCH_CONFIG_REGISTRY[arch](args)  # old checkpoints lack options that came later
    data = settings.task.get("data")
    return Pretrained(
        path=path,
        settings=settings,
        args=args,
        arch=arch,
        spec=_spec(args, arch),
        max_positions=_max_positions(args, settings, weights),
        symbols=embeddings[0].size(0),
        dictionary=Path(str(data).split(":")[0], DICTIONARY) if data else None,
        weights=weights if with_weights else {},
    )


def _spec(args: Namespace, arch: str) -> Spec:
    """Return the position encodings; fairseq's own models say them by other options."""
    if issubclass(ARCH_MODEL_REGISTRY[arch], PositionalRoberta):
        return resolve(args).encoder
    if getattr(args, "no_token_positional_embeddings", False):
        return parse("none")
    return parse("learned" if args.encoder_learned_pos else "sinusoidal(layout=fairseq)")


def _max_positions(args: Namespace, settings: Any, weights: dict[str, Tensor]) -> int:
    for name, value in weights.items():
        if name.endswith(STOCK_TABLE):
            return value.size(0) - STOCK_OFFSET
    return int(getattr(args, "max_positions", None) or settings.task.tokens_per_sample)


def _model_options() -> list[str]:
    parser = ArgumentParser(allow_abbrev=False)
    PositionalRoberta.add_args(parser)
    return sorted({action.dest for action in parser._actions} - _NOT_THE_MODEL)
