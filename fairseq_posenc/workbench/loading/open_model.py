"""Opens trained models of three families, ours or fairseq's, and builds untrained ones."""

import warnings
from argparse import Namespace
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from fairseq import options
from fairseq import tasks as fairseq_tasks
from fairseq.checkpoint_utils import load_model_ensemble
from fairseq.data import Dictionary, data_utils
from fairseq.dataclass.utils import convert_namespace_to_omegaconf, overwrite_args_by_name
from fairseq.models import ARCH_MODEL_REGISTRY
from fairseq.models.roberta import RobertaModel
from fairseq.models.transformer import TransformerModel
from fairseq.models.transformer_lm import TransformerLanguageModel
from fairseq.tasks import TASK_REGISTRY
from fairseq.tasks.translation import TranslationTask
from fairseq.utils import split_paths
from omegaconf import OmegaConf
from torch import Tensor

from fairseq_posenc.checkpoints.dictionary import DICTIONARY, fingerprint, load_dictionary
from fairseq_posenc.checkpoints.state_dict_adapter import refuse_broken_weights
from fairseq_posenc.errors import UserError, counted
from fairseq_posenc.identity import Identity, is_identity
from fairseq_posenc.tokens.subwords import GPT2, PieceEncoder, Pieces, Tokenizer
from fairseq_posenc.tokens.tokenizer import ENCODER_JSON, MERGES, PIECES
from fairseq_posenc.workbench.loading.checkpoints import State, load_state, refuse_unusable_settings

# fairseq's classes by family; ours are derived from them.
STOCK_CLASSES = {
    "masked_lm": RobertaModel,
    "causal_lm": TransformerLanguageModel,
    "translation": TransformerModel,
}


def find_family(arch: str | None) -> str | None:
    """Find the family of an architecture, ours or fairseq's; None if it is in no family."""
    cls = ARCH_MODEL_REGISTRY.get(arch, object)  # the model class
    return next((name for name, stock in STOCK_CLASSES.items() if issubclass(cls, stock)), None)


def list_stacks(model: Any) -> dict[str, Any]:
    """List the stacks of a model by name, ``encoder`` and ``decoder``."""
    return {
        side: getattr(stack, "sentence_encoder", stack)  # RoBERTa's encoder contains its stack
        for side in ("encoder", "decoder")
        if (stack := getattr(model, side, None)) is not None
    }


def build_settings(model_options: dict[str, Any], task_options: dict[str, Any]) -> dict[str, Any]:
    """Build fairseq's configuration of a training run, as a dictionary of sections.

    Options that are not given have their defaults. ``_name`` is the architecture, or the task, and
    the task has a dataclass. If the model has none, the section ``model`` is a Namespace.
    """
    command = ["DATA", "--task", task_options["_name"], "--arch", model_options["_name"]]
    args = options.parse_args_and_arch(options.get_training_parser(), command)
    vars(args).update(model_options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # hydra warns about fairseq's configuration
        config = convert_namespace_to_omegaconf(args)
    sections: Any = OmegaConf.to_container(config, resolve=True, enum_to_str=True)
    # The task's options, such as the path of DATA, bypass hydra, which would interpolate `${...}`.
    return {**sections, "task": sections["task"] | task_options}


def build_model(settings: Mapping[str, Any], dictionaries: Sequence[Dictionary]) -> Any:
    """Build a model with new parameters, without data.

    Args:
        settings: result of :func:`build_settings`.
        dictionaries: the dictionaries of its text, the source's first.
    """
    task = SimpleNamespace(  # all that models read of a task while they are built
        source_dictionary=dictionaries[0],
        target_dictionary=dictionaries[-1],  # the source's where there is only one
        cfg=Namespace(**settings["task"]),
    )
    section = deepcopy(settings["model"])  # because fairseq changes it
    args = Namespace(**(section if isinstance(section, dict) else vars(section)))
    return ARCH_MODEL_REGISTRY[args._name].build_model(args, task)


class TrainedDictionary(NamedTuple):
    """What a checkpoint records about a dictionary of its training."""

    checkpoint: Path
    size: int | None  # number of symbols; None without token embeddings
    symbols_hash: str | None  # `fingerprint` of its symbols; None in checkpoints of fairseq
    trained_file: Path | None  # what training read, which may be gone; None if unknown

    def check(self, file: Path, dictionary: Dictionary, advice: str) -> None:
        """Refuse a dictionary that differs from the one used in training.

        Args:
            file: file of the dictionary to check.
            dictionary: its content.
            advice: ends the message.
        """
        has_mask = "<mask>" in dictionary  # some tasks add it after loading
        if self.size is not None and self.size != len(dictionary):
            symbols = f"{counted(len(dictionary), 'symbols')}{' with <mask>' if has_mask else ''}"
            raise UserError(f"{file} has {symbols}, but {self.checkpoint} {self.size:,}; {advice}")
        trained = self.symbols_hash  # else that of the file, if it still exists
        if trained is None and self.trained_file and self.trained_file.is_file():
            trained = fingerprint(load_dictionary(self.trained_file, mask=has_mask))
        if trained is not None and trained != fingerprint(dictionary):
            fault = "differs in its symbols, or in their order, from the dictionary of"
            raise UserError(f"{file} {fault} {self.checkpoint}; {advice}")


@dataclass(frozen=True)
class OpenTask:
    """The task of a trained model, set up on its data."""

    path: Path  # the checkpoint
    task: Any  # fairseq's task
    settings: Any  # fairseq's configuration in training, but with this data-bin and its languages
    data: Path  # the data-bin, with the dictionaries and the tokenizer's files
    dictionaries: dict[str, Dictionary]  # file name -> dictionary; the source's is the first


def translates(settings: Any) -> bool:
    """Check whether the settings of a task are for translation."""
    return issubclass(TASK_REGISTRY.get(settings.get("_name"), object), TranslationTask)


def open_task(path: Path, state: State, data: Path | None = None) -> OpenTask:
    """Set up the task of a checkpoint.

    Args:
        path: the checkpoint.
        state: its content.
        data: folder with the dictionaries; by default the one used in training.

    Raises:
        UserError: the folder or a dictionary is missing, or is not the one used in training.
    """
    settings = deepcopy(state["cfg"])
    trained_folder = Path(split_paths(str(settings.task.get("data")))[0])  # its first shard
    folder = data or trained_folder
    if not folder.is_dir():
        why = "" if data else f": {path} was trained on it; name its new place with --data"
        raise UserError(f"--data {folder}: no such folder{why}")
    if translates(settings.task):
        pair = settings.task.source_lang, settings.task.target_lang
        if not all(pair):
            pair = data_utils.infer_language_pair(str(folder))
        if None in pair:
            raise UserError(f"--data {folder}: no files of a language pair, such as test.fr-en.fr")
        settings.task.source_lang, settings.task.target_lang = pair
        files = [f"dict.{language}.txt" for language in pair]
    else:
        is_glue = (folder / "input0").is_dir()  # `input0` has the first sentence of each example
        files = [f"input0/{DICTIONARY}" if is_glue else DICTIONARY]
    for name in files:
        if not (folder / name).is_file():
            known = f"the folder that {path} was trained on"
            advice = f"name {known}, or a copy of its dictionaries and tokenizer"
            raise UserError(f"--data {folder}: holds no {name}; {advice}")
    # The model may have been trained with --init-positions. Here, it would replace positions that
    # the checkpoint lacks by new ones, and so hide a wrong spec or a damaged file.
    overwrite_args_by_name(settings, {"data": str(folder), "init_positions": False})  # in place
    task = fairseq_tasks.setup_task(settings.task)
    # `files` has the source's first. If it is alone, `zip` leaves out the target's dictionary: the
    # same one, or one of labels.
    dictionaries = dict(zip(files, (task.source_dictionary, task.target_dictionary)))
    prefixes = ("encoder.", "decoder.") if len(files) > 1 else ("",)  # of names of weights
    advice = "--data must have the dictionary that the model was trained with"
    for name, prefix in zip(files, prefixes):
        trained = read_trained_dictionary(state["model"], path, trained_folder / name, prefix)
        trained.check(folder / name, dictionaries[name], advice)
    return OpenTask(path, task, settings, folder, dictionaries)


def read_trained_dictionary(
    weights: dict[str, Tensor], path: Path, file: Path | None, prefix: str = ""
) -> TrainedDictionary:
    """Read what a checkpoint records about a dictionary.

    Args:
        weights: its weights, by name.
        path: the checkpoint.
        file: the dictionary's file that training read, which may be gone; None if unknown.
        prefix: beginning of the names of the weights of the stack that reads its symbols.
    """
    names = [name for name in weights if name.startswith(prefix)]
    # The embeddings have a row for each symbol.
    size = next((weights[x].size(0) for x in names if x.endswith("embed_tokens.weight")), None)
    known = None
    for name in filter(is_identity, names):  # the tensor in which our stacks keep their settings
        known = Identity.from_tensor(weights[name]).weight_settings.dictionary  # a fingerprint
    return TrainedDictionary(path, size, known, file)


def find_pieces(folder: Path, language: str = "") -> Path | None:
    """Find the sentencepiece model of a language, or of all, in a folder; None without one."""
    names = (f"sentencepiece.{language}.model", PIECES)
    return next((folder / name for name in names if (folder / name).is_file()), None)


def load_tokenizer(folder: Path, dictionary: Dictionary, language: str = "") -> Tokenizer:
    """Load the tokenizer whose files are in a folder; refuse a folder without them."""
    if pieces := find_pieces(folder, language):
        return PieceEncoder(Pieces(pieces), dictionary)
    if (folder / ENCODER_JSON).exists():
        return GPT2(folder / ENCODER_JSON, folder / MERGES, dictionary)
    raise UserError(f"{folder}: holds neither {PIECES} nor {ENCODER_JSON} and {MERGES}")


@dataclass(frozen=True)
class OpenModel(OpenTask):
    """A trained model and what it was trained with."""

    family: str  # one of `STOCK_CLASSES`
    model: Any  # fairseq's or ours; float32, eval mode, on the CPU
    state: State  # content of the checkpoint

    @property
    def title(self) -> str:
        """Name of the family in messages."""
        return self.family.replace("_lm", " LM")  # `masked LM`, `causal LM`, `translation`

    @property
    def stacks(self) -> dict[str, Any]:
        """The stacks by name, ``encoder`` and ``decoder``."""
        return list_stacks(self.model)

    @property
    def positions(self) -> dict[str, str | None]:
        """The position encodings of each stack, as a spec; None if the model is fairseq's."""
        found = self.stacks.items()
        return {name: str(x.spec) if hasattr(x, "spec") else None for name, x in found}

    @property
    def head(self) -> str:
        """The head of a model of ours: ``spans``, ``classes``, or the name of its family."""
        if self.family != "masked_lm":
            return self.family
        if self.model.span_head is not None:  # an attribute of our RoBERTa only
            return "spans"
        return "classes" if self.model.classification_heads else "masked_lm"  # as for GLUE

    @property
    def ties_embeddings(self) -> bool:
        """Whether input and output have the same embeddings."""
        outputs = {"encoder.lm_head.weight", "decoder.output_projection.weight"}
        return outputs.isdisjoint(dict(self.model.named_parameters()))  # lists tied ones once


def open_model(
    path: Path, data: Path | None = None, option: str = "--checkpoint", state: State | None = None
) -> OpenModel:
    """Open a trained model.

    Args:
        path: the checkpoint.
        data: data-bin with the dictionaries; by default the one used in training.
        option: the option that named the checkpoint, for messages.
        state: content of the checkpoint if it was read already.

    Raises:
        UserError: the file is not a whole checkpoint of one of the families, weights are NaN or
            infinite, or a dictionary is missing or is not the one used in training.
    """
    state = state or load_state(path, option)
    arch = getattr(state["cfg"].model, "_name", None)
    family = find_family(arch)
    if family is None:
        known = ", ".join(STOCK_CLASSES)
        raise UserError(f"{option} {path}: a model of the kind {arch}; this command reads {known}")
    with refuse_unusable_settings(option, path):  # errors of building, in one line
        opened = open_task(path, state, data)
        # `args` is the old form of the settings; fairseq would prefer it to `cfg`.
        state = {**state, "cfg": opened.settings, "args": None}
        (model,), _ = load_model_ensemble([str(path)], task=opened.task, state=state)
        # Our models refuse NaN and infinite weights while they are loaded; fairseq's do not.
        refuse_broken_weights(state["model"], model.state_dict())
    return OpenModel(**vars(opened), family=family, model=model.float().eval(), state=state)
