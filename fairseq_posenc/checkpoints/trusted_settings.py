"""Checks the settings in a checkpoint before fairseq builds a model from them.

fairseq evaluates some settings as Python (``eval``), which then must be literals: an audit hook
refuses others (:mod:`~fairseq_posenc.host.audit_hook`). Here settings must be of plain types, and
must not be resolved by omegaconf (``${...}``) or instantiated by hydra (``_target_``); a task of
speech starts ``post_save_script`` as a program.
"""

import ast
import re
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sized
from math import prod
from typing import Any

from fairseq_posenc.errors import UserError, shortened

# Settings that name files which fairseq's models, tasks and tokenizers open, other than the data.
OPENED = {
    *("encoder_embed_path", "decoder_embed_path", "pretrained_checkpoint", "source_dict"),
    *("pretrained_mlm_checkpoint", "pretrained_xlm_checkpoint", "load_pretrained_encoder_from"),
    *("load_pretrained_decoder_from", "sampling_weights_from_file", "label_dir", "lang_dict"),
    *("target_dict", "fixed_dictionary", "config_yaml", "multitask_config_yaml"),
}
# Types of settings, and of their containers. No subclasses, which could run any code.
_PLAIN = (type(None), bool, int, float, str)
_HOLDERS = (dict, list, tuple, Namespace)
_MAX_DEPTH = 32  # of mappings in mappings, which may contain each other
_MAX_EVALUATED = 10_000  # characters of a text that fairseq evaluates, and items of its value
# `# coding: utf-7` in the first lines makes Python decode the same bytes to another program.
_CODING = re.compile(r"#.*coding")


def check_settings(state: Mapping[str, object]) -> None:
    """Refuse settings that would be run as code, or that fairseq could not read.

    They are in ``cfg``, in older checkpoints in ``args``.
    """
    cfg, args = state.get("cfg"), state.get("args")
    for name, value, types in (("settings", cfg, (dict, Namespace)), ("args", args, (Namespace,))):
        if value is not None and type(value) not in types:
            raise UserError(f"its {name} are not settings, but {quote(value)}")
    for place, _, key, value in _iterate_settings(state):
        label = shortened(f"{place}.{key}".removeprefix("cfg.").lstrip("."))
        if type(value) not in (*_PLAIN, *_HOLDERS):
            raise UserError(
                f"its setting {label} is of the type {type(value).__name__}; settings are text, "
                "numbers, true or false, none, and lists and mappings of these"
            )
        is_program = key in ("_target_", "post_save_script") and value
        if is_program or (isinstance(value, str) and "${" in value):
            raise UserError(
                f"its setting {label} would be run as code: {quote(value)}; use a file from a "
                "source you trust"
            )


def forget_files(state: Mapping[str, object]) -> None:
    """Set the settings that name files to None.

    Commands of this package need no such file, as the checkpoint has what was read from it.
    """
    for _, holder, key, value in list(_iterate_settings(state)):
        if key in OPENED and isinstance(value, str):
            holder[key] = None


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


def _iterate_settings(state: Mapping[str, object]) -> Iterator[tuple[str, Any, Any, Any]]:
    """Yield the place, holder, key and value of each setting, at all levels."""
    root = {name: state.get(name) for name in ("args", "cfg")}
    to_visit: list[tuple[str, Any, int]] = [("", root, 0)]
    while to_visit:
        place, section, depth = to_visit.pop()
        if isinstance(section, (list, tuple)):
            section = dict(enumerate(section))  # a copy: items of lists are only read
        if not isinstance(section, (dict, Namespace)):
            continue
        if depth > _MAX_DEPTH:
            raise UserError(f"its settings {shortened(place)} are nested more than 32 deep")
        holder = vars(section) if isinstance(section, Namespace) else section
        for key, value in list(holder.items()):
            yield place, holder, key, value
            to_visit.append((f"{place}.{key}".lstrip("."), value, depth + 1))


def quote(value: Any) -> str:
    """Quote a text or a number for a message; of any other value name only the type."""
    if type(value) in (str, int, float, bool):
        return repr(shortened(" ".join(str(value)[:_MAX_EVALUATED].split())))
    return "None" if value is None else f"something of the type {type(value).__name__}"
