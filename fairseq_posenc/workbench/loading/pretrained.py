"""Reads a trained RoBERTa to start from: options that build it again, positions, dictionary.

No model is built, so neither the data nor the dictionaries used in training are needed.
"""

import re
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any, NamedTuple

from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY
from fairseq.utils import split_paths

from fairseq_posenc.checkpoints.dictionary import DICTIONARY, load_dictionary
from fairseq_posenc.checkpoints.state_dict_adapter import STOCK_OFFSET, STOCK_SPEC, STOCK_TABLE
from fairseq_posenc.errors import UserError
from fairseq_posenc.models.masked_lm import PositionalRoberta
from fairseq_posenc.specs import Spec
from fairseq_posenc.transformer.options import as_namespace, parse_options, read_options
from fairseq_posenc.workbench.loading import open_model
from fairseq_posenc.workbench.loading.checkpoints import load_state, refuse_unusable_settings

# Options of models that concern loading or training, and do not define the model.
_NOT_THE_MODEL = re.compile(
    "dropout|layerdrop|(checkpoint|offload)_activations|min_params_to_wrap|"
    "init_positions|load_checkpoint_heads|position_backend"
)


class Pretrained(NamedTuple):
    """A trained RoBERTa, ours or fairseq's."""

    path: Path  # the checkpoint
    model_options: dict[str, Any]  # section `model` of settings that build it as one of ours
    spec: Spec  # position encodings
    max_positions: int  # number of positions
    dictionary: open_model.TrainedDictionary

    def check_dictionary(self, path: Path) -> None:
        """Refuse the dictionary of data, a file, if the model was trained with another one."""
        advice = "make the data with the vocabulary of the pre-training: --dict"
        self.dictionary.check(path, load_dictionary(path), advice)


def read_pretrained(path: Path) -> Pretrained:
    """Read the checkpoint of a trained RoBERTa, which ``--checkpoint`` named.

    Raises:
        UserError: the file is missing, not a whole checkpoint, or holds a model of another family.
    """
    state = load_state(path, "--checkpoint")
    settings, weights = state["cfg"], state["model"]
    args = Namespace(**vars(as_namespace(settings.model)))  # a copy, which is changed below
    arch = getattr(args, "_name", None)
    with refuse_unusable_settings("--checkpoint", path):  # one line for any error
        if arch is None or open_model.find_family(arch) != "masked_lm":
            raise UserError(f"a model of the architecture {arch}, not a RoBERTa or DecBERT")
        data = settings.task.get("data")
        file = Path(split_paths(str(data))[0], DICTIONARY) if data else None  # may be gone
        dictionary = open_model.read_trained_dictionary(weights, path, file)
        if not dictionary.size:  # rows of the token embeddings; None if the weights have none
            raise UserError("holds no token embeddings")
        ARCH_CONFIG_REGISTRY[arch](args)  # adds defaults of options newer than the checkpoint
        if not issubclass(ARCH_MODEL_REGISTRY[arch], PositionalRoberta):
            # fairseq's positions as our option; the section below has no encoder_learned_pos.
            args.position_encoding = "learned" if args.encoder_learned_pos else STOCK_SPEC
            if args.no_token_positional_embeddings:
                args.position_encoding = "none"
                args.no_token_positional_embeddings = False  # our RoBERTa refuses True
            # Each encoding has an architecture: roberta_sinusoidal for sinusoidal(layout=fairseq).
            args._name = f"roberta_{args.position_encoding.partition('(')[0]}"
        spec, _decoder_spec, _directions = parse_options(read_options(args))
        # The table of fairseq's learned positions wins over the options; its first 2 rows are for
        # no position. A weight without dimensions is damaged: loading refuses it.
        tables = [x for name, x in weights.items() if name.endswith(STOCK_TABLE) and x.dim()]
        count = tables[0].size(0) - STOCK_OFFSET if tables else getattr(args, "max_positions", 0)
        max_positions = int(count or settings.task.tokens_per_sample)  # as fairseq does
        section = {**_list_model_options(args), "max_positions": max_positions, "_name": args._name}
        return Pretrained(path, section, spec, max_positions, dictionary)


def _list_model_options(args: Namespace) -> dict[str, Any]:
    """List the values of the options that define a RoBERTa, except options without a value."""
    parser = ArgumentParser(allow_abbrev=False, add_help=False)
    PositionalRoberta.add_args(parser)
    names = sorted(option.dest for option in parser._actions)  # argparse has no public list
    values = {x: getattr(args, x, None) for x in names if not _NOT_THE_MODEL.search(x)}
    return {name: value for name, value in values.items() if value is not None}
