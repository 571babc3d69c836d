"""fairseq's dictionary as a masked language model has it."""

from __future__ import annotations

from pathlib import Path

from fairseq.data import Dictionary

from fairseq_posenc.errors import UserError

DICTIONARY = "dict.txt"


def load_dictionary(path: Path) -> Dictionary:
    """Return a dictionary as masked language models have it, with ``<mask>`` at its end.

    Raises:
        UserError: it cannot be read.
    """
    try:
        dictionary = Dictionary.load(str(path))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: no dictionary of fairseq ({error})") from None
    dictionary.add_symbol("<mask>")
    return dictionary
