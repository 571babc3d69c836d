"""The model of a checkpoint, with its dictionaries, as the export reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from fairseq import checkpoint_utils
from fairseq.data import Dictionary, data_utils
from fairseq.dataclass.utils import overwrite_args_by_name
from torch import Tensor

from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.loading.checkpoints import data_folder, load_state
from fairseq_posenc.workbench.loading.families import FAMILIES, NO_WEIGHTS, stacks_of


class Trained(NamedTuple):
    """A trained model of this package.

    Attributes:
        path: its checkpoint.
        family: ``masked_lm``, ``causal_lm`` or ``translation``.
        model: in float32, in evaluation mode, on the CPU.
        state: the checkpoint, as fairseq upgrades it.
        data: folder with the dictionaries.
        dictionaries: by the name of their file; that of the source first.
    """

    path: Path
    family: str
    model: Any
    state: dict[str, Any]
    data: Path
    dictionaries: dict[str, Dictionary]

    @property
    def settings(self) -> Any:
        """The configuration of its training."""
        return self.state["cfg"]

    @property
    def stacks(self) -> dict[str, Any]:
        """Its encoder, its decoder, or both."""
        return dict(stacks_of(self.model))

    @property
    def head(self) -> str:
        """What the model was trained for: ``spans``, ``classes``, or its family."""
        if self.family != "masked_lm":
            return self.family
        if self.model.span_head is not None:
            return "spans"
        return "classes" if self.model.classification_heads else "masked_lm"

    @property
    def tied(self) -> bool:
        """Whether the output embeddings are those of the input."""
        if self.family == "masked_lm":
            encoder = self.model.encoder
            return encoder.lm_head.weight is encoder.sentence_encoder.embed_tokens.weight
        decoder = self.model.decoder
        return decoder.output_projection.weight is decoder.embed_tokens.weight

    @property
    def weights(self) -> dict[str, Tensor]:
        """Its parameters by fairseq's names; what is no weight is left out."""
        state: dict[str, Tensor] = self.model.state_dict()
        return {name: state[name] for name in state if not name.endswith(NO_WEIGHTS)}


def open_trained(path: Path, data: Path | None) -> Trained:
    """Read a checkpoint.

    Args:
        path: the file.
        data: the folder with its dictionaries, if that is not where it was trained.

    Raises:
        UserError: no whole checkpoint, no dictionary, or a model of another kind.
    """
    state = load_state(path, "--checkpoint")
    settings = state["cfg"]
    folder = data_folder(path, state, data)
    names = _dictionaries(settings.task, folder)
    for name in names:
        if not (folder / name).is_file():
            raise UserError(
                f"{folder / name}, the dictionary of {path}, is not there: name the folder that "
                "has it with --data"
            )
    overwrite_args_by_name(settings, {"data": str(folder), "init_positions": False})
    (model,), _, task = checkpoint_utils.load_model_ensemble_and_task([str(path)], state=state)
    family = next((each.name for each in FAMILIES if isinstance(model, each.kind)), None)
    if family is None:
        raise UserError(
            f"--checkpoint {path}: a {type(model).__name__}, and this is for models of "
            "fairseq_posenc; fairseq-posenc swap makes one of it"
        )
    read = (task.source_dictionary, task.target_dictionary) if len(names) > 1 else ()
    dictionaries = read or (task.source_dictionary,)
    return Trained(
        path, family, model.float().eval(), state, folder, dict(zip(names, dictionaries))
    )


def _dictionaries(task: Any, folder: Path) -> list[str]:
    """Name the files of a task's dictionaries in its data folder; complete its languages."""
    if task._name == "translation":
        pair = task.source_lang, task.target_lang
        if not all(pair):
            pair = data_utils.infer_language_pair(str(folder))
        if not all(pair):
            raise UserError(f"--data {folder}: has no files of a language pair, as test.fr-en.fr")
        task.source_lang, task.target_lang = pair  # fairseq keeps what it infers to itself
        return [f"dict.{language}.txt" for language in pair]
    return ["input0/dict.txt" if (folder / "input0").is_dir() else "dict.txt"]
