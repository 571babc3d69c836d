"""Loading fairseq's dictionaries."""

from __future__ import annotations

from pathlib import Path

from fairseq.data import Dictionary

from fairseq_posenc.errors import UserError

DICTIONARY = "dict.txt"


def load_dictionary(path: Path, mask: bool = True) -> Dictionary:
    """Load a dictionary.

    Args:
        path: the ``dict.txt``.
        mask: add ``<mask>`` at the end, as the tasks of masked language models do; the file of a
            data-bin does not have it.

    Raises:
        UserError: it cannot be read.
    """
    try:
        dictionary = Dictionary.load(str(path))
    except Exception as error:  # fairseq raises OSError, ValueError, RuntimeError, plain Exception
        raise UserError(f"{path}: not a fairseq dictionary ({error})") from None
    if mask:
        dictionary.add_symbol("<mask>")
    return dictionary
