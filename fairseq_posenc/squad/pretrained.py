"""The pre-trained model that fine-tuning starts from: everything that builds it again."""

from __future__ import annotations

import warnings
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any, NamedTuple

from fairseq import checkpoint_utils
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY
from fairseq.models.roberta import RobertaModel

from fairseq_posenc.errors import UserError, one_line
from fairseq_posenc.models.base import plain_args
from fairseq_posenc.models.masked_lm import PositionalRoberta
from fairseq_posenc.squad.databin import DataBin
from fairseq_posenc.squad.offsets import load_dictionary

State = dict[str, Any]
# About how a checkpoint is loaded, or a training made; not about what the model is.
_NOT_THE_MODEL = {
    *("help", "init_positions", "load_checkpoint_heads", "position_backend"),
    *("dropout", "attention_dropout", "activation_dropout", "pooler_dropout", "encoder_layerdrop"),
    *("checkpoint_activations", "offload_activations", "min_params_to_wrap"),
}


class Pretrained(NamedTuple):
    """A masked language model.

    Attributes:
        path: its checkpoint.
        options: the model section of a configuration that builds it again.
        symbols: size of its dictionary.
        data: the folder that it was trained on, as its settings tell.
    """

    path: Path
    options: dict[str, Any]
    symbols: int
    data: str

    @property
    def position_encoding(self) -> str:
        """Its position encodings."""
        return str(self.options["position_encoding"])


def load_state(path: Path) -> State:
    """Return a checkpoint on the CPU, as fairseq upgrades it.

    Raises:
        UserError: it is no file, or no whole checkpoint.
    """
    if not path.is_file():
        raise UserError(f"--checkpoint {path}: no such file")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # hydra's, about fairseq's configuration
            state: State = checkpoint_utils.load_checkpoint_to_cpu(str(path))
        _ = state["cfg"].model, state["cfg"].task, state["model"]
    except Exception as error:  # what torch raises depends on what the file holds
        reason = one_line(error) or f"not a whole checkpoint of fairseq ({type(error).__name__})"
        raise UserError(f"--checkpoint {path}: {reason}") from None
    return state


def read_pretrained(path: Path) -> Pretrained:
    """Read how a model was built: one of ours, or of fairseq's RoBERTa.

    Raises:
        UserError: no checkpoint, or of another family.
    """
    state = load_state(path)
    args = Namespace(**vars(plain_args(state["cfg"].model)))
    name = str(getattr(args, "_name", None) or getattr(args, "arch", None))
    kind = ARCH_MODEL_REGISTRY.get(name, object)
    embeddings = [key for key in state["model"] if key.endswith(".embed_tokens.weight")]
    if not issubclass(kind, RobertaModel) or not embeddings:
        raise UserError(f"--checkpoint {path}: a model {name!r}, not of the RoBERTa family")
    ARCH_CONFIG_REGISTRY[name](args)  # fills in what old checkpoints do not tell
    options = {option: getattr(args, option, None) for option in _model_options()}
    if not issubclass(kind, PositionalRoberta):
        options["position_encoding"] = "learned"
    options["_name"] = name if issubclass(kind, PositionalRoberta) else "roberta_learned"
    return Pretrained(
        path,
        {option: value for option, value in options.items() if value is not None},
        state["model"][embeddings[0]].size(0),
        str(state["cfg"].task.data),
    )


def _model_options() -> list[str]:
    parser = ArgumentParser(allow_abbrev=False)
    PositionalRoberta.add_args(parser)
    return sorted({action.dest for action in parser._actions} - _NOT_THE_MODEL)


def refuse_other_vocabulary(pretrained: Pretrained, data_bin: DataBin) -> None:
    """Refuse tokens that mean something else to the model.

    A dictionary of the same size with other symbols is found out only if the one of the
    pre-training is still there.

    Raises:
        UserError: says how they differ.
    """
    ours = load_dictionary(data_bin.dictionary)
    advice = "make the data with the vocabulary of the pre-training"
    if len(ours) != pretrained.symbols:
        raise UserError(
            f"--data {data_bin.path}: dict.txt has {len(ours):,} symbols with <mask>, but "
            f"{pretrained.path} has {pretrained.symbols:,}; {advice}"
        )
    trained = Path(pretrained.data.split(":")[0], "dict.txt")
    if trained.is_file() and load_dictionary(trained).symbols != ours.symbols:
        raise UserError(
            f"--data {data_bin.path}: dict.txt has other symbols than {trained}, which "
            f"{pretrained.path} was trained with; {advice}"
        )
