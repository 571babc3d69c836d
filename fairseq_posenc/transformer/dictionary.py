"""fairseq's dictionaries: as a masked language model has them, and their fingerprints."""

from __future__ import annotations

import hashlib
from pathlib import Path

from fairseq.data import Dictionary

from fairseq_posenc.errors import UserError

DICTIONARY = "dict.txt"


class Placeholders(Dictionary):
    """Stands in for a dictionary of which only the size is known."""

    def __init__(self, size: int) -> None:
        super().__init__()
        for number in range(size - len(self)):
            self.add_symbol(f"symbol{number}")


def fingerprint(dictionary: Dictionary) -> str | None:
    """Hash the symbols of a dictionary in their order; None if they are not known."""
    if isinstance(dictionary, Placeholders):
        return None
    return hashlib.sha256(
        "\n".join(dictionary.symbols).encode("utf-8", "surrogatepass")
    ).hexdigest()[:16]


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
