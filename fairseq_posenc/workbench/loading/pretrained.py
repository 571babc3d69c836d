"""Reads a trained RoBERTa to start from: the options that build it again, weights, dictionary.

No model is built, so neither the data nor the dictionaries of the training are needed.
"""

from argparse import Namespace
from pathlib import Path
from typing import Any, NamedTuple

from fairseq.models import ARCH_CONFIG_REGISTRY
from fairseq.utils import split_paths
from torch import Tensor

from fairseq_posenc.checkpoints.dictionary import DICTIONARY, load_dictionary
from fairseq_posenc.checkpoints.state_dict_adapter import STOCK_OFFSET, STOCK_SPEC, STOCK_TABLE
from fairseq_posenc.errors import UserError
from fairseq_posenc.specs import Spec, parse
from fairseq_posenc.transformer.options import as_namespace, resolve_positions
from fairseq_posenc.workbench.loading.checkpoints import load_state, refuse_unusable_settings
from fairseq_posenc.workbench.loading.dictionaries import (
    TrainedDictionary,
    read_trained_dictionaries,
)
from fairseq_posenc.workbench.loading.families import (
    Family,
    find_family,
    list_model_options,
    read_architecture,
)

# Options of models that concern loading or training, and do not define the model.
NOT_THE_MODEL = {
    "init_positions",
    "load_checkpoint_heads",
    "position_backend",
    "dropout",
    "attention_dropout",
    "activation_dropout",
    "relu_dropout",
    "pooler_dropout",
    "encoder_layerdrop",
    "decoder_layerdrop",
    "encoder_embed_path",
    "decoder_embed_path",
    "checkpoint_activations",
    "offload_activations",
    "min_params_to_wrap",
}


class Pretrained(NamedTuple):
    """A trained RoBERTa, ours or fairseq's."""

    path: Path  # the checkpoint
    settings: Any  # fairseq's configuration of the training
    args: Namespace  # all options of the model
    arch: str  # architecture
    family: Family
    specs: dict[str, Spec]  # `encoder` or `decoder` -> position encodings
    num_positions: dict[str, int]  # `encoder` or `decoder` -> number of positions
    dictionaries: list[TrainedDictionary]  # of each stack; the source's is the first

    @property
    def spec(self) -> Spec:
        """The position encodings of the first stack."""
        return next(iter(self.specs.values()))

    @property
    def max_positions(self) -> int:
        """The number of positions of the first stack."""
        return next(iter(self.num_positions.values()))

    @property
    def dictionary_sizes(self) -> list[int]:
        """The sizes of the dictionaries, with ``<mask>``; the source's is the first."""
        return [dictionary.size or 0 for dictionary in self.dictionaries]

    @property
    def directions(self) -> str:
        """The attention direction of each layer, as in ``lr,rl``; empty if all are ``both``."""
        return str(getattr(self.args, "attention_directions", None) or "")

    @property
    def roberta_section(self) -> dict[str, Any]:
        """The section ``model`` of a configuration that builds a RoBERTa again, as one of ours."""
        # Any of our architectures lists them; `roberta_none` stands for all.
        names = {option.dest for option in list_model_options("roberta_none")}
        is_ours = find_family(self.arch) is not None
        # A RoBERTa of fairseq has a single encoding, which names the architecture of ours.
        arch = self.arch if is_ours else f"roberta_{self.spec.items[0].name}"
        options = {
            **{name: getattr(self.args, name, None) for name in sorted(names - NOT_THE_MODEL)},
            "_name": arch,
            "position_encoding": str(self.spec),
            "max_positions": self.max_positions,
        }
        return {name: value for name, value in options.items() if value is not None}

    def check_dictionary(self, path: Path) -> None:
        """Refuse the dictionary of data for the model if it is not that of the training."""
        advice = "make the data with the vocabulary of the pre-training: --dict"
        self.dictionaries[0].check(path, load_dictionary(path), advice)


def read_pretrained(path: Path, for_fairseq: bool = False) -> Pretrained:
    """Read the checkpoint of a trained RoBERTa, which ``--checkpoint`` named.

    Args:
        path: the checkpoint.
        for_fairseq: whether fairseq will read the file, too; see :func:`load_state`.

    Raises:
        UserError: the file is missing, no whole checkpoint, or of another family.
    """
    label = f"--checkpoint {path}"
    state = load_state(path, "--checkpoint", for_fairseq)
    settings, weights = state["cfg"], state["model"]
    args = Namespace(**vars(as_namespace(settings.model)))  # a copy, to which options are added
    arch = read_architecture(args)
    family = find_family(arch, stock=True)
    if arch is None or family is None or family.name != "masked_lm":
        raise UserError(
            f"{label}: a model of the architecture {arch}, not a RoBERTa (roberta_... or "
            "decbert_...)"
        )
    with refuse_unusable_settings(label):
        data = settings.task.get("data")
        file = Path(split_paths(str(data))[0], DICTIONARY) if data else None
        dictionaries = read_trained_dictionaries(weights, path, [file])
        if not all(dictionary.size for dictionary in dictionaries):
            raise UserError(f"{label}: holds no token embeddings")
        ARCH_CONFIG_REGISTRY[arch](args)  # sets options that are newer than the checkpoint
        return Pretrained(
            path=path,
            settings=settings,
            args=args,
            arch=arch,
            family=family,
            specs=_read_specs(args, arch, family),
            num_positions=_count_positions(args, settings, family, weights),
            dictionaries=dictionaries,
        )


def _read_specs(args: Namespace, arch: str, family: Family) -> dict[str, Spec]:
    """Read the position encodings of each stack, from our options or from fairseq's."""
    if find_family(arch):
        options = resolve_positions(args)
        return {side: getattr(options, side) for side in family.length_options}
    if getattr(args, "no_token_positional_embeddings", False):
        return {side: parse("none") for side in family.length_options}
    learned = {side: getattr(args, f"{side}_learned_pos", False) for side in family.length_options}
    return {side: parse("learned" if learned[side] else STOCK_SPEC) for side in learned}


def _count_positions(
    args: Namespace, settings: Any, family: Family, weights: dict[str, Tensor]
) -> dict[str, int]:
    """Count the positions of each stack: rows of fairseq's position table, else by option."""
    counts = {}
    for side, option in family.length_options.items():
        # The oldest RoBERTas call their encoder decoder, so any name will do.
        prefix = f"{side}." if family.name != "masked_lm" else ""
        in_tables = (
            weight.size(0) - STOCK_OFFSET
            for name, weight in weights.items()
            # A weight without dimensions is damaged; it is refused when it is loaded.
            if name.startswith(prefix) and name.endswith(STOCK_TABLE) and weight.dim()
        )
        count = next(in_tables, 0) or getattr(args, option, None)
        counts[side] = int(count or settings.task.tokens_per_sample)  # fairseq's own fallback
    return counts
