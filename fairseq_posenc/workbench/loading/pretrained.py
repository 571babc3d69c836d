"""Reads a trained RoBERTa to start from: the options that build it again, weights, dictionary.

No model is built, so neither the data nor the dictionaries of the training are needed.
"""

import re
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any, NamedTuple

from fairseq.models import ARCH_CONFIG_REGISTRY
from fairseq.utils import split_paths
from torch import Tensor

from fairseq_posenc.checkpoints.dictionary import DICTIONARY, load_dictionary
from fairseq_posenc.checkpoints.state_dict_adapter import STOCK_OFFSET, STOCK_SPEC, STOCK_TABLE
from fairseq_posenc.errors import UserError
from fairseq_posenc.models.masked_lm import PositionalRoberta
from fairseq_posenc.specs import Spec, parse
from fairseq_posenc.transformer.options import as_namespace, resolve_positions
from fairseq_posenc.workbench.loading.checkpoints import load_state, refuse_unusable_settings
from fairseq_posenc.workbench.loading.dictionaries import (
    TrainedDictionary,
    read_trained_dictionaries,
)
from fairseq_posenc.workbench.loading.families import find_family, read_architecture

# Options of models that concern loading or training, and do not define the model.
_NOT_THE_MODEL = re.compile(
    "dropout|layerdrop|embed_path|(checkpoint|offload)_activations|min_params_to_wrap|"
    "init_positions|load_checkpoint_heads|position_backend"
)


class Pretrained(NamedTuple):
    """A trained RoBERTa, ours or fairseq's."""

    path: Path  # the checkpoint
    arch: str  # architecture
    args: Namespace  # all options of the model
    spec: Spec  # position encodings
    max_positions: int  # number of positions
    dictionary: TrainedDictionary

    @property
    def directions(self) -> str:
        """The attention direction of each layer, as in ``lr,rl``; empty if all are ``both``."""
        return str(getattr(self.args, "attention_directions", None) or "")

    @property
    def roberta_section(self) -> dict[str, Any]:
        """The section ``model`` of a configuration that builds a RoBERTa again, as one of ours."""
        parser = ArgumentParser(allow_abbrev=False, add_help=False)
        PositionalRoberta.add_args(parser)
        names = sorted(option.dest for option in parser._actions)  # argparse has no public list
        is_ours = find_family(self.arch) is not None
        # A RoBERTa of fairseq has a single encoding, which names the architecture of ours.
        arch = self.arch if is_ours else f"roberta_{self.spec.items[0].name}"
        options = {
            **{name: getattr(self.args, name, None) for name in names},
            "_name": arch,
            "position_encoding": str(self.spec),
            "max_positions": self.max_positions,
        }
        return {
            name: value
            for name, value in options.items()
            if value is not None and not _NOT_THE_MODEL.search(name)
        }

    def check_dictionary(self, path: Path) -> None:
        """Refuse the dictionary of data for the model if it is not that of the training."""
        advice = "make the data with the vocabulary of the pre-training: --dict"
        self.dictionary.check(path, load_dictionary(path), advice)


def read_pretrained(path: Path) -> Pretrained:
    """Read the checkpoint of a trained RoBERTa, which ``--checkpoint`` named.

    Raises:
        UserError: the file is missing, no whole checkpoint, or of another family.
    """
    label = f"--checkpoint {path}"
    state = load_state(path, "--checkpoint")
    settings, weights = state["cfg"], state["model"]
    args = Namespace(**vars(as_namespace(settings.model)))  # a copy: the line below adds options
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
        (dictionary,) = read_trained_dictionaries(weights, path, [file])
        if not dictionary.size:
            raise UserError(f"{label}: holds no token embeddings")
        ARCH_CONFIG_REGISTRY[arch](args)  # adds defaults of options newer than the checkpoint
        # The rows of fairseq's table win over the options; the last is fairseq's own fallback.
        count = _count_positions(weights) or getattr(args, "max_positions", None)
        return Pretrained(
            path=path,
            arch=arch,
            args=args,
            spec=_read_spec(args, arch),
            max_positions=int(count or settings.task.tokens_per_sample),
            dictionary=dictionary,
        )


def _read_spec(args: Namespace, arch: str) -> Spec:
    """Read the position encodings from our options or from fairseq's."""
    if find_family(arch):
        return resolve_positions(args).encoder
    if getattr(args, "no_token_positional_embeddings", False):
        return parse("none")
    return parse("learned" if getattr(args, "encoder_learned_pos", False) else STOCK_SPEC)


def _count_positions(weights: dict[str, Tensor]) -> int:
    """Count the positions in fairseq's table; 0 without one."""
    # A weight without dimensions is damaged; it is refused when it is loaded.
    tables = (x for name, x in weights.items() if name.endswith(STOCK_TABLE) and x.dim())
    return next((table.size(0) - STOCK_OFFSET for table in tables), 0)  # rows before position 0
