"""Checks the settings in a checkpoint before fairseq builds a model from them.

fairseq evaluates some settings as Python (``eval``), and opens the files that others name; to torch
they are plain text. Here the former must be literals, and the latter must be set by the user's
command line. All settings must be of a few plain types, not too many and not nested too deep.
"""

import ast
import re
import sys
from argparse import Namespace
from collections.abc import Iterator, Sized
from math import prod
from typing import Any, NamedTuple

from fairseq_posenc.errors import UserError, shortened

# Settings that fairseq evaluates; tests/checkpoints/test_trusted_settings.py searches for more.
EVALUATED = {
    "adaptive_softmax_cutoff",
    "adaptive_input_cutoff",
    "character_filters",
    "xformers_att_config",
    "encoder_layers",
    "decoder_layers",
    "encoder_attention",
    "decoder_attention",
    "self_attention",
    "project_input",
    "gated_attention",
    "downsample",
    "pretrained",
    "conv_feature_layers",
    "conv_aggregator_layers",
    "left_pad_source",
    "left_pad_target",
    "adam_betas",
    "adamax_betas",
    "adafactor_eps",
    "lamb_betas",
    "wer_args",
    "pipeline_balance",
    "pipeline_devices",
    "pipeline_encoder_balance",
    "pipeline_encoder_devices",
    "pipeline_decoder_balance",
    "pipeline_decoder_devices",
}
# Settings that name files which fairseq's models, tasks and criterions open, other than the data.
OPENED = {
    "encoder_embed_path",
    "decoder_embed_path",
    "pretrained_checkpoint",
    "pretrained_mlm_checkpoint",
    "pretrained_xlm_checkpoint",
    "w2v_path",
    "seq2seq_path",
    "load_pretrained_encoder_from",
    "load_pretrained_decoder_from",
    "speaker_emb_path",
    "load_pretrained_aux_decoder_from",
    "sampling_weights_from_file",
    "label_dir",
    "post_save_script",  # a program that a task of speech starts
    "lang_dict",
    "source_dict",
    "target_dict",
    "fixed_dictionary",
    "lang_to_offline_shard_ratio",
    "gpt2_encoder_json",
    "gpt2_vocab_bpe",
    "bpe_codes",
    "bpe_vocab_file",
    "bpe_vocab",
    "bpe_merges",
    "sentencepiece_model",
    "sentencepiece_model_path",
    "save_predictions",
    "wer_kenlm_model",
    "wer_lexicon",
}
# Settings that name a file in the folder of the data, such as config.yaml, without a path.
IN_DATA = {"config_yaml", "multitask_config_yaml"}
_LAYERS = ("encoder_layers_to_keep", "decoder_layers_to_keep")  # fairseq reads each part by int()
_SECTIONS = ("common", "task", "model", "dataset", "optimization", "checkpoint")
_BUILT_FROM = ("task", "model", "criterion")  # the sections from which fairseq builds objects
# Types of settings other than str and int, and of their containers. No subclasses, which could run
# any code when fairseq uses them.
_PLAIN = (type(None), bool, float)
_HOLDERS = (dict, list, tuple, Namespace)
# fairseq's configurations have some 500 settings, 5 levels deep for a model inside a model.
# omegaconf takes 50 us to read a setting, and reads a shared one again in every place.
_MAX_SETTINGS = 20_000
_MAX_DEPTH = 32
_MAX_TEXT = 1_000_000  # characters of a text
_MAX_NAME = 200  # characters of a setting's name
_MAX_BITS = 64  # of a whole number
_MAX_EVALUATED = 10_000  # characters of a text that fairseq evaluates, and items of its value
# `# coding: utf-7` in the first lines makes Python decode the same bytes to another program.
_CODING = re.compile(r"#.*coding")


class _Setting(NamedTuple):
    """A setting in a checkpoint."""

    place: str  # for example `cfg.model.encoder_layers`
    name: str  # the last part of the place
    value: Any
    holder: dict[Any, Any]  # the mapping that contains it

    @property
    def label(self) -> str:
        """The place as messages show it."""
        return shortened(self.place.removeprefix("cfg."))


def check_settings(state: dict[str, Any]) -> None:
    """Refuse settings that fairseq would run as code, or could not read.

    They are in ``cfg``, in older checkpoints in ``args``.
    """
    cfg, args = state.get("cfg"), state.get("args")
    sections = {"settings": cfg}
    if type(cfg) in (dict, Namespace):
        sections |= {name: _get_contents(cfg).get(name) for name in _SECTIONS}
    for name, section in sections.items():
        if section is not None and type(section) not in (dict, Namespace):
            raise UserError(f"its {name} are not settings, but {_quote(section)}")
    if args is not None and type(args) is not Namespace:
        raise UserError(f"its args are not settings, but {_quote(args)}")
    for setting in _iterate_settings(state):
        name, value = setting.name, setting.value
        is_text = isinstance(value, str)
        if wrong := _describe_wrong_value(value):
            raise UserError(
                f"its setting {setting.label} {wrong}; settings are text, numbers, true or false, "
                "none, and lists and mappings of these"
            )
        is_code = is_text and ("${" in value or (name in EVALUATED and not is_literal(value)))
        if is_code or name == "_target_":
            raise UserError(
                f"its setting {setting.label} would be run as code: {_quote(value)}. Only literals "
                "(numbers, words, lists of them) are taken there; use a file from a source you "
                "trust."
            )
        lists_layers = is_text and re.fullmatch(r"\d{1,9}(,\d{1,9})*", value)
        if name in _LAYERS and value and not lists_layers:
            raise UserError(
                f"its setting {setting.label} is not a list of layers, as 0,2,4: {_quote(value)}"
            )


def _describe_wrong_value(value: Any) -> str | None:
    """Describe why a value cannot be a setting; None if it can."""
    kind = type(value)
    if kind is str and len(value) > _MAX_TEXT:
        return f"has {len(value):,} characters"
    if kind is int and value.bit_length() > _MAX_BITS:
        return f"is a number of {value.bit_length():,} bits"
    return None if kind in (str, int, *_PLAIN, *_HOLDERS) else f"is of the type {kind.__name__}"


def refuse_files(state: dict[str, Any]) -> None:
    """Refuse settings that name a file, unless this process's command line sets them."""
    for setting in _list_files(state):
        if not _is_set_by(sys.argv[1:], setting.name):
            raise UserError(
                f"its setting {setting.label} names a file, {_quote(setting.value)}, which "
                f"fairseq would open; remove it with --model-overrides \"{{'{setting.name}': "
                f'None}}" (its numbers are in the checkpoint), or name the setting on the '
                "command line of the training"
            )


def forget_files(state: dict[str, Any]) -> None:
    """Set the settings that name files to None.

    Commands of this package need no such file, as the checkpoint has what was read from it.
    """
    for setting in _list_files(state):
        setting.holder[setting.name] = None


def is_name(key: Any) -> bool:
    """Check whether the key of a mapping is a short printable text or a number."""
    if type(key) is str:
        return len(key) <= _MAX_NAME and key.isprintable()
    return type(key) is int and key.bit_length() <= _MAX_BITS


def is_literal(text: str) -> bool:
    """Check whether Python evaluates a text to numbers, words, and lists and mappings of them.

    Beside the literals of ``ast.literal_eval``, sums and repetitions of lists are allowed, which
    fairseq's architectures have: ``[(512, 3)] * 4 + [(256, 1)]``.
    """
    if len(text) > _MAX_EVALUATED or _CODING.search(text):
        return False
    try:
        return _count_parts(ast.parse(text.strip() or "None", mode="eval").body) <= _MAX_EVALUATED
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        return False


def _count_parts(node: ast.expr) -> int:
    """Count the characters or items of the value of a literal, a sum or a product.

    Raises:
        ValueError or TypeError: the expression is something else.
    """
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _count_parts(node.left) + _count_parts(node.right)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        factors = [ast.literal_eval(factor) for factor in (node.left, node.right)]
        # A negative count would cancel that of the other term of a sum.
        return prod(abs(factor) if isinstance(factor, int) else len(factor) for factor in factors)
    value = ast.literal_eval(node)
    return len(value) if isinstance(value, Sized) else 1


def _iterate_settings(state: dict[str, Any]) -> Iterator[_Setting]:
    """Yield the settings of a checkpoint, at all levels; refuse too many or too deep ones."""
    root = {name: state.get(name) for name in ("args", "cfg")}
    to_visit: list[tuple[str, Any, int]] = [("", root, 0)]
    count = 0
    while to_visit:
        place, section, depth = to_visit.pop()
        if isinstance(section, (list, tuple)):
            section = dict(enumerate(section))
        if not isinstance(section, (dict, Namespace)):
            continue
        holder = _get_contents(section)
        count += len(holder)
        label = shortened(place.removeprefix("cfg.") or "cfg")
        if depth > _MAX_DEPTH:
            raise UserError(f"its settings {label} are nested more than {_MAX_DEPTH} deep")
        if count > _MAX_SETTINGS:
            raise UserError(f"it has more than {_MAX_SETTINGS:,} settings, {label} among them")
        for key, value in holder.items():
            if not is_name(key):
                raise UserError(f"its settings {label} have an invalid name: {_quote(key)}")
            inner = f"{place}.{key}".lstrip(".")
            yield _Setting(inner, str(key), value, holder)
            to_visit.append((inner, value, depth + 1))


def _list_files(state: dict[str, Any]) -> list[_Setting]:
    """List the settings of models, tasks and criterions that name a file."""
    files = []
    for setting in _iterate_settings(state):
        place, name, value, _ = setting
        root, _, rest = place.partition(".")
        is_read = root == "args" or rest.partition(".")[0] in _BUILT_FROM
        # `args` of older checkpoints contains the options of tokenizers, too, which are not read.
        of_tokenizer = root == "args" and "bpe" in name
        is_opened = name in OPENED and not of_tokenizer
        is_outside_data = name in IN_DATA and "/" in str(value)
        if is_read and (is_opened or is_outside_data) and value not in (None, ""):
            files.append(setting)
    return files


def _get_contents(section: Any) -> dict[Any, Any]:
    """Get the settings in a mapping or a Namespace, by name."""
    return vars(section) if isinstance(section, Namespace) else section


def _is_set_by(words: list[str], setting: str) -> bool:
    """Check whether a command line sets a setting x, by ``--x``, ``model.x=`` or ``{'x': ...}``.

    Its name elsewhere proves nothing: a file may have the name of a setting.
    """
    option = "--" + setting.replace("_", "-")
    override = rf"""(\+*([\w@/]+\.)*{setting}=.*|\s*\{{.*['"]{setting}['"]\s*:.*)"""
    return any(
        word.replace("_", "-").partition("=")[0] == option or re.fullmatch(override, word, re.S)
        for word in (argument.removeprefix("--model-overrides=") for argument in words)
    )


def _quote(value: Any) -> str:
    """Quote a text or a number for a message; of any other value name only the type."""
    if type(value) is int and value.bit_length() > _MAX_BITS:
        return f"a number of {value.bit_length():,} bits"
    if type(value) in (str, int, float, bool):
        return repr(shortened(" ".join(str(value)[:_MAX_EVALUATED].split())))
    return "None" if value is None else f"something of the type {type(value).__name__}"
