"""Opens a trained model of any family, ours or fairseq's, with its task and dictionaries."""

from pathlib import Path
from typing import Any, NamedTuple, Optional

from fairseq import checkpoint_utils
from fairseq.data import Dictionary
from torch import Tensor

from fairseq_posenc.checkpoints.weights import refuse_broken_weights
from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.loading import families
from fairseq_posenc.workbench.loading.checkpoints import State, load_state, refuse_unusable_settings
from fairseq_posenc.workbench.loading.dictionaries import open_task
from fairseq_posenc.workbench.loading.families import TaskKind


class OpenModel(NamedTuple):
    """A trained model and what it was trained with."""

    path: Path  # the checkpoint
    family: TaskKind
    model: Any  # of fairseq or of ours; float32, eval mode, on the CPU
    task: Any  # fairseq's task, with the dictionaries
    state: State  # content of the checkpoint, with upgraded settings
    data: Path  # the data-bin, with the dictionaries and the tokenizer's files
    dictionaries: dict[str, Dictionary]  # file name -> dictionary; the source's is the first

    @property
    def settings(self) -> Any:
        """The configuration of the training, in the form of fairseq."""
        return self.state["cfg"]

    @property
    def stacks(self) -> dict[str, Any]:
        """The stacks by name, ``encoder`` and ``decoder``."""
        return dict(families.list_stacks(self.model))

    @property
    def positions(self) -> dict[str, Optional[str]]:
        """The position encodings of each stack, as a spec; None if the model is fairseq's."""
        return {
            name: str(stack.assembly.spec) if hasattr(stack, "assembly") else None
            for name, stack in self.stacks.items()
        }

    @property
    def head(self) -> str:
        """The head of a model of ours: ``spans``, ``classes``, or the name of its family."""
        if self.family.name != "masked_lm":
            return self.family.name
        if self.model.span_head is not None:  # an attribute of our RoBERTa only
            return "spans"
        return "classes" if self.model.classification_heads else "masked_lm"

    @property
    def translates(self) -> bool:
        """Whether it is a translation model."""
        return self.family.name == "translation"

    @property
    def ties_embeddings(self) -> bool:
        """Whether the output embeddings are those of the input."""
        if self.family.name == "masked_lm":
            encoder = self.model.encoder
            return encoder.lm_head.weight is encoder.sentence_encoder.embed_tokens.weight
        decoder = self.model.decoder
        return decoder.output_projection.weight is decoder.embed_tokens.weight

    @property
    def weights(self) -> dict[str, Tensor]:
        """The weights by fairseq's names, tied ones under each; other entries are left out."""
        state: dict[str, Tensor] = self.model.state_dict()
        return {name: state[name] for name in state if not name.endswith(families.NOT_WEIGHTS)}


def open_model(
    path: Path,
    data: Optional[Path] = None,
    *,
    option: str = "--checkpoint",
    state: Optional[State] = None,
) -> OpenModel:
    """Open a trained model.

    Args:
        path: the checkpoint.
        data: data-bin with the dictionaries; by default the one of the training.
        option: the option that named the checkpoint, for messages.
        state: content of the checkpoint if it was read already.

    Raises:
        UserError: the file is not a whole checkpoint of one of the families, weights are NaN or
            infinite, or a dictionary is missing or is not that of the training.
    """
    state = state or load_state(path, option)
    arch = families.read_architecture(state["cfg"].model)
    family = families.find_family(arch, stock=True)
    if family is None:
        titles = ", ".join(known.title for known in families.FAMILIES)
        raise UserError(f"{option} {path}: a model of the kind {arch}; this command reads {titles}")
    with refuse_unusable_settings(f"{option} {path}"):
        opened = open_task(path, state, data)
        # `args` is the old form of the settings; fairseq would prefer it to `cfg`.
        state = {**state, "cfg": opened.settings, "args": None}
        try:
            (model,), _ = checkpoint_utils.load_model_ensemble(
                [str(path)], task=opened.task, state=state
            )
            # Our models check this while they are loaded; fairseq's models do not.
            refuse_broken_weights(state["model"], model.state_dict())
        except UserError as error:
            raise UserError(f"{option} {path}: {error}") from error
    model = model.float().eval()
    return OpenModel(path, family, model, opened.task, state, opened.data, opened.dictionaries)
