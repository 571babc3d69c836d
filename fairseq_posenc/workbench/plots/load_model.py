"""A checkpoint of any family, fairseq's own too, opened to look inside."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple, Optional

from fairseq_posenc.workbench.running import host  # noqa: F401  (before fairseq: keeps it quiet)

# isort: split
from fairseq import checkpoint_utils
from fairseq import tasks as fairseq_tasks
from fairseq.data import Dictionary, data_utils
from fairseq.dataclass.utils import overwrite_args_by_name
from fairseq.models import ARCH_MODEL_REGISTRY, MODEL_REGISTRY
from fairseq.models.roberta import RobertaModel
from fairseq.models.transformer import (
    TransformerDecoderBase,
    TransformerEncoderBase,
    TransformerModelBase,
)
from fairseq.models.transformer_lm import TransformerLanguageModel

from fairseq_posenc.checkpoints.weights import refuse_broken_weights
from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.loading.checkpoints import State, data_folder, load_state

MASKED, CAUSAL, TRANSLATION = "masked LM", "causal LM", "translation"
_FAMILIES = {
    MASKED: RobertaModel,
    CAUSAL: TransformerLanguageModel,
    TRANSLATION: TransformerModelBase,
}
_EMBEDDINGS = "embed_tokens.weight"


class LoadedModel(NamedTuple):
    """A trained model and what it was trained with.

    Attributes:
        path: its checkpoint.
        family: :data:`MASKED`, :data:`CAUSAL` or :data:`TRANSLATION`.
        model: in float32, in evaluation mode, on the CPU.
        task: fairseq's, with the dictionaries.
        folder: the data-bin, with the files of the dictionaries and of what cut the text.
    """

    path: Path
    family: str
    model: Any
    task: Any
    folder: Path

    @property
    def stacks(self) -> dict[str, Any]:
        """Its stacks, called ``encoder`` and ``decoder``."""
        return {
            "decoder" if isinstance(each, TransformerDecoderBase) else "encoder": each
            for each in self.model.modules()
            if isinstance(each, (TransformerEncoderBase, TransformerDecoderBase))
        }

    @property
    def positions(self) -> dict[str, Optional[str]]:
        """The position encodings of each stack; None where they are fairseq's own."""
        return {
            name: str(stack.assembly.spec) if hasattr(stack, "assembly") else None
            for name, stack in self.stacks.items()
        }


def load_model(path: Path, data: Optional[Path] = None) -> LoadedModel:
    """Open a model.

    Args:
        path: its checkpoint.
        data: folder with its dictionaries; None for the one that it was trained on.

    Raises:
        UserError: no whole checkpoint of one of the families, weights that are no numbers, no
            dictionary, or one of another size.
    """
    what = f"--checkpoint {path}"
    state = load_state(path, "--checkpoint")
    family = _family(what, state["cfg"].model)
    folder = data_folder(path, state, data)
    _check_dictionaries(folder, state["cfg"].task, family)
    overwrite_args_by_name(state["cfg"], {"data": str(folder), "init_positions": False})
    task = fairseq_tasks.setup_task(state["cfg"].task)
    _check_sizes(path, state, task, folder)
    model = _build(what, path, state, task)
    return LoadedModel(path, family, model.float().eval(), task, folder)


def _family(what: str, settings: Any) -> str:
    name = str(getattr(settings, "_name", None) or getattr(settings, "arch", None))
    kind = {**MODEL_REGISTRY, **ARCH_MODEL_REGISTRY}.get(name, object)
    for family, base in _FAMILIES.items():
        if issubclass(kind, base):
            return family
    raise UserError(f"{what}: a model of the kind {name}; those of {', '.join(_FAMILIES)} are read")


def _check_dictionaries(folder: Path, task: Any, family: str) -> None:
    languages: list[Optional[str]] = [None]
    if family == TRANSLATION:
        languages = [task.source_lang, task.target_lang]
        if not all(languages):
            languages = list(data_utils.infer_language_pair(str(folder)))
        if not all(languages):
            raise UserError(f"--data {folder}: has no files of a language pair, as dict.fr.txt")
    for language in languages:
        path = folder / (f"dict.{language}.txt" if language else "dict.txt")
        if not path.is_file():
            raise UserError(
                f"--data {folder}: holds no {path.name}; name the folder that the model was "
                "trained on, or a copy of its dictionaries and of what cut its text"
            )


def _check_sizes(path: Path, state: State, task: Any, folder: Path) -> None:
    """Refuse a dictionary of another size; the names are not in a checkpoint."""
    dictionaries = {"encoder": task.source_dictionary, "decoder": task.target_dictionary}
    for name, weight in state["model"].items():
        stack = name.partition(".")[0]
        symbols: Optional[Dictionary] = dictionaries.get(stack)
        if name.endswith(_EMBEDDINGS) and symbols and weight.size(0) != len(symbols):
            raise UserError(
                f"--data {folder}: has a dictionary of {len(symbols):,} symbols, but {path} was "
                f"trained with {weight.size(0):,} ({name}); name the folder it was trained on"
            )


def _build(what: str, path: Path, state: State, task: Any) -> Any:
    try:
        (model,), _ = checkpoint_utils.load_model_ensemble(
            [str(path)], task=task, state={**state, "args": None}
        )
        refuse_broken_weights(state["model"], model.state_dict())  # fairseq's own do not
    except UserError as error:
        raise UserError(f"{what}: {error}") from error
    return model
