"""A trained model of any family, fairseq's own too, opened with its task and dictionaries."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple, Optional

from fairseq_posenc.workbench.running import host  # noqa: F401  (before fairseq: keeps it quiet)

# isort: split
from fairseq import checkpoint_utils
from fairseq.data import Dictionary
from fairseq.dataclass.utils import overwrite_args_by_name
from torch import Tensor

from fairseq_posenc.checkpoints.weights import refuse_broken_weights
from fairseq_posenc.errors import UserError
from fairseq_posenc.identity import override_positions
from fairseq_posenc.specs import Spec
from fairseq_posenc.workbench.loading import families
from fairseq_posenc.workbench.loading.checkpoints import State, load_state, refuse_unusable_settings
from fairseq_posenc.workbench.loading.dictionaries import open_task
from fairseq_posenc.workbench.loading.families import Family


class OpenModel(NamedTuple):
    """A trained model and what it was trained with."""

    path: Path  # its checkpoint
    family: Family
    model: Any  # float32, eval mode, on the CPU
    task: Any  # fairseq's, with the dictionaries
    state: State  # the checkpoint, as fairseq upgrades it
    data: Path  # the data-bin, with the dictionaries and the tokenizer's files
    dictionaries: dict[str, Dictionary]  # file name -> dictionary, the source's first

    @property
    def settings(self) -> Any:
        """The configuration of its training."""
        return self.state["cfg"]

    @property
    def stacks(self) -> dict[str, Any]:
        """Its stacks, called ``encoder`` and ``decoder``."""
        return dict(families.list_stacks(self.model))

    @property
    def positions(self) -> dict[str, Optional[str]]:
        """The position encodings of each stack; None where they are fairseq's own."""
        return {
            name: str(stack.assembly.spec) if hasattr(stack, "assembly") else None
            for name, stack in self.stacks.items()
        }

    @property
    def head(self) -> str:
        """What a model of ours was trained for: ``spans``, ``classes``, or its family."""
        if self.family.name != "masked_lm":
            return self.family.name
        if self.model.span_head is not None:
            return "spans"
        return "classes" if self.model.classification_heads else "masked_lm"

    @property
    def tied(self) -> bool:
        """Whether the output embeddings are those of the input."""
        if self.family.name == "masked_lm":
            encoder = self.model.encoder
            return encoder.lm_head.weight is encoder.sentence_encoder.embed_tokens.weight
        decoder = self.model.decoder
        return decoder.output_projection.weight is decoder.embed_tokens.weight

    @property
    def weights(self) -> dict[str, Tensor]:
        """Its parameters by fairseq's names; what is not a weight is left out."""
        state: dict[str, Tensor] = self.model.state_dict()
        return {name: state[name] for name in state if not name.endswith(families.NO_WEIGHTS)}


def open_model(
    path: Path,
    data: Optional[Path] = None,
    *,
    option: str = "--checkpoint",
    state: Optional[State] = None,
    spec: Optional[Spec] = None,
) -> OpenModel:
    """Open a model, with the dictionaries of ``data`` or of the folder that it was trained on.

    ``state`` is the checkpoint where the caller has read it; ``spec`` are positions to read the
    model with, in place of those that it was trained with.

    Raises:
        UserError: no whole checkpoint of one of the families, weights that are NaN or infinite, no
            dictionary or another one, or positions that do not fit the weights.
    """
    state = load_state(path, option) if state is None else state
    arch = families.architecture(state["cfg"].model)
    family = families.find_family(arch, stock=True)
    if family is None:
        kinds = ", ".join(known.title for known in families.FAMILIES)
        raise UserError(f"{option} {path}: a model of the kind {arch}; this command reads {kinds}")
    # A checkpoint may have been trained with --init-positions; here it would hide a mistake.
    changes: dict[str, Any] = {"init_positions": False}
    if spec is not None:
        changes |= {"position_encoding": str(spec), "position_encoding_decoder": None}
    with refuse_unusable_settings(f"{option} {path}"):
        task, folder, dictionaries = open_task(path, state, data)
        try:
            if spec is not None:
                override_positions(state["model"], spec)
            overwrite_args_by_name(state["cfg"], changes)
            (model,), _ = checkpoint_utils.load_model_ensemble(
                [str(path)], task=task, state={**state, "args": None}
            )
            refuse_broken_weights(state["model"], model.state_dict())  # fairseq's own do not
        except UserError as error:
            how = f" cannot be read with {spec}" if spec else ""
            raise UserError(f"{option} {path}{how}: {error}") from error
    return OpenModel(path, family, model.float().eval(), task, state, folder, dictionaries)
