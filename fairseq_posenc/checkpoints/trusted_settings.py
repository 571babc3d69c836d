"""Settings of a checkpoint, checked before fairseq builds a model of them.

fairseq evaluates some settings as Python (``eval``), and opens the files that others name. torch
lets both through, as they are plain text. So the first have to be literals here, and the second
have to be named by the user's own command line.
"""

import ast
import re
import sys
from argparse import Namespace
from collections.abc import Iterator
from typing import Any, NamedTuple

from fairseq_posenc.errors import UserError, shortened

# What fairseq gives to eval; tests/checkpoints/test_trusted_settings.py searches for more.
EVALUATED = {
    *("adaptive_softmax_cutoff", "adaptive_input_cutoff", "character_filters"),
    *("xformers_att_config", "encoder_layers", "decoder_layers", "encoder_attention"),
    *("decoder_attention", "self_attention", "project_input", "gated_attention", "downsample"),
    *("pretrained", "conv_feature_layers", "conv_aggregator_layers", "left_pad_source"),
    *("left_pad_target", "adam_betas", "adamax_betas", "adafactor_eps", "lamb_betas", "wer_args"),
    *("pipeline_balance", "pipeline_devices", "pipeline_encoder_balance"),
    *("pipeline_encoder_devices", "pipeline_decoder_balance", "pipeline_decoder_devices"),
}
# Name the files that fairseq's models, tasks and criterions open, beside those of the data.
OPENED = {
    *("encoder_embed_path", "decoder_embed_path", "pretrained_checkpoint"),
    *("pretrained_mlm_checkpoint", "pretrained_xlm_checkpoint", "w2v_path", "seq2seq_path"),
    *("load_pretrained_encoder_from", "load_pretrained_decoder_from", "speaker_emb_path"),
    *("lang_dict", "source_dict", "target_dict", "fixed_dictionary"),
    *("lang_to_offline_shard_ratio", "gpt2_encoder_json", "gpt2_vocab_bpe", "bpe_codes"),
    *("bpe_vocab_file", "bpe_vocab", "bpe_merges", "sentencepiece_model"),
    *("sentencepiece_model_path", "save_predictions", "wer_kenlm_model", "wer_lexicon"),
}
_LAYERS = ("encoder_layers_to_keep", "decoder_layers_to_keep")
_MAPPINGS = ("common", "task", "model", "dataset", "optimization", "checkpoint")
_BUILT_OF = ("task", "model", "criterion")  # the sections that are read, the others only kept
_MOST_REPEATS, _LONGEST = 10_000, 100_000


class _Setting(NamedTuple):
    """A setting: its place in the checkpoint, its name, its value, and what holds it."""

    place: str
    name: str
    value: Any
    holder: dict[Any, Any]

    @property
    def label(self) -> str:
        """The place as messages name it."""
        return self.place.removeprefix("cfg.")


def check_settings(state: Any) -> None:
    """Refuse settings (`cfg`, older `args`) that fairseq would run as code, or could not read."""
    cfg = state.get("cfg") if isinstance(state, dict) else None
    for name in ("", *_MAPPINGS) if cfg is not None else ():
        section = _get_contents(cfg).get(name) if name else cfg
        if section is not None and not isinstance(section, (dict, Namespace)):
            raise UserError(f"its {name or 'settings'} are not settings, but {_quote(section)}")
    for setting in _iterate_settings(state):
        name, value, is_text = setting.name, setting.value, isinstance(setting.value, str)
        is_code = is_text and ("${" in value or (name in EVALUATED and not is_literal(value)))
        if is_code or name == "_target_":
            raise UserError(
                f"its setting {setting.label} would be run as code: {_quote(value)}. Only literals "
                "(numbers, words, lists of them) are taken there; use a file from a source you "
                "trust."
            )
        listed = is_text and re.fullmatch(r"\d+(,\d+)*", value)
        if name in _LAYERS and value and not listed:
            raise UserError(
                f"its setting {setting.label} is not a list of layers, as 0,2,4: {_quote(value)}"
            )


def refuse_files(state: Any) -> None:
    """Refuse settings that name a file, unless this process's command line names the setting."""
    for setting in _list_files(state):
        if not _is_named(setting.name, sys.argv[1:]):
            raise UserError(
                f"its setting {setting.label} names a file, {_quote(setting.value)}, which fairseq "
                f"would open; take it away with --model-overrides \"{{'{setting.name}': None}}\" "
                "(its numbers are in the checkpoint), or name the setting on the command line of "
                "the training"
            )


def forget_files(state: Any) -> None:
    """Take the names of files out of settings: the weights that were in them are the checkpoint's.

    Commands of ours do so, as none of them reads such a file.
    """
    for setting in _list_files(state):
        setting.holder[setting.name] = None


def is_literal(text: str) -> bool:
    """Check whether Python evaluates a text to numbers, words, and lists and mappings of them.

    That is what ``ast.literal_eval`` takes, and what fairseq's own architectures have besides:
    sums of lists, and lists that are repeated, as in ``[(512, 3)] * 4 + [(256, 1)]``.
    """
    if len(text) > _LONGEST:
        return False
    try:
        return _is_plain(ast.parse(text.strip() or "None", mode="eval").body)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return False


def _is_plain(node: ast.expr) -> bool:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _is_plain(node.left) and _is_plain(node.right)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        return _is_constant(node.left) and _is_constant(node.right) and _is_short_product(node)
    return _is_constant(node)


def _is_constant(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError):
        return False
    return True


def _is_short_product(product: ast.BinOp) -> bool:
    """Check whether a product is no longer than an architecture's."""
    factors = [ast.literal_eval(each) for each in (product.left, product.right)]
    return all(not isinstance(each, int) or each <= _MOST_REPEATS for each in factors)


def _iterate_settings(state: Any) -> Iterator[_Setting]:
    """Yield the settings of a checkpoint, sections and what is in them."""
    kept = {name: state.get(name) for name in ("args", "cfg")} if isinstance(state, dict) else {}
    left: list[tuple[str, Any]] = [("", kept)]
    seen: set[int] = set()
    while left:
        place, thing = left.pop()
        if isinstance(thing, (list, tuple)):
            thing = dict(enumerate(thing))
        if not isinstance(thing, (dict, Namespace)) or id(thing) in seen:
            continue
        seen.add(id(thing))
        holder = _get_contents(thing)
        for key, value in holder.items():
            inner = f"{place}.{key}".lstrip(".")
            yield _Setting(inner, str(key), value, holder)
            left.append((inner, value))


def _list_files(state: Any) -> list[_Setting]:
    """List the settings of models and tasks that name a file; older checkpoints have one list."""
    files = []
    for each in _iterate_settings(state):
        start, _, rest = each.place.partition(".")
        read = start == "args" or rest.partition(".")[0] in _BUILT_OF
        # Tokenizers stand in older checkpoints' one list, too, and are not read from there.
        whose = each.name in OPENED and not (start == "args" and "bpe" in each.name)
        if read and whose and each.value not in (None, ""):
            files.append(each)
    return files


def _get_contents(section: Any) -> dict[Any, Any]:
    """Get the settings of a mapping, or of what argparse parsed, by name."""
    return vars(section) if isinstance(section, Namespace) else section


def _is_named(setting: str, words: list[str]) -> bool:
    """Check whether a command line sets it: ``--x``, ``model.x=`` or ``{'x': ...}``.

    A file may be called like a setting, so its name anywhere proves nothing.
    """
    option = "--" + setting.replace("_", "-")
    override = rf"""(\+*([\w@/]+\.)*{setting}=.*|\s*\{{.*['"]{setting}['"]\s*:.*)"""
    return any(
        word.replace("_", "-").partition("=")[0] == option or re.fullmatch(override, word, re.S)
        for word in (each.removeprefix("--model-overrides=") for each in words)
    )


def _quote(value: Any) -> str:
    return repr(shortened(" ".join(str(value).split())))
