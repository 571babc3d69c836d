"""Loading fairseq's dictionaries, and their fingerprints."""

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


def load_dictionary(path: Path, mask: bool = True) -> Dictionary:
    """Load a ``dict.txt``; add ``<mask>``, which the tasks of masked language models do, if asked.

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
