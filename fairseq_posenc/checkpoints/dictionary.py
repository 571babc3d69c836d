"""Loads and hashes fairseq's dictionaries.

A data-bin of running text has one dictionary, ``dict.txt``; one of pairs of sentences has
``dict.LANG.txt`` for each of its two languages.
"""

import hashlib
import io
from pathlib import Path

from fairseq.data import Dictionary

from fairseq_posenc.errors import UserError, shortened

DICTIONARY = "dict.txt"
MANIFEST = "manifest.json"  # of a data-bin: what it was made from


class Placeholders(Dictionary):
    """Stands in for the dictionary of a checkpoint, of which only the size is known."""

    def __init__(self, size: int) -> None:
        super().__init__()
        for number in range(size - len(self)):
            self.add_symbol(f"symbol{number}")


def fingerprint(dictionary: Dictionary) -> str | None:
    """Hash a dictionary's symbols, in their order, to 16 hex digits; None if they are unknown."""
    if isinstance(dictionary, Placeholders):
        return None
    symbols = "\n".join(dictionary.symbols).encode("utf-8", "surrogatepass")  # may hold surrogates
    return hashlib.sha256(symbols).hexdigest()[:16]


def load_dictionary(path: Path, *, mask: bool = True) -> Dictionary:
    """Load a ``dict.txt``.

    Args:
        path: the file.
        mask: whether to add ``<mask>``, as the tasks of masked language models do.

    Raises:
        UserError: the file cannot be read, or a line of it, which the message names.
    """
    dictionary = Dictionary()
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise UserError(f"{path}: not a fairseq dictionary ({error.strerror})") from None
    for number, line in enumerate(lines, start=1):  # one by one: a message names the bad line
        try:
            dictionary.add_from_file(io.StringIO(line.decode("utf-8") + "\n"))
        except (ValueError, RuntimeError) as error:
            reason = shortened(str(error).partition(". ")[0].replace("\n", ""))  # its advice is cut
            raise UserError(f"{path}: not a fairseq dictionary (line {number}: {reason})") from None
    if mask:
        dictionary.add_symbol("<mask>")
    return dictionary
