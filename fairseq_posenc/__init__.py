"""Position encodings for Transformers: for PyTorch (``api``), fairseq and transformers (``hf``).

With ``--user-dir fairseq_posenc`` fairseq imports the package and the modules of ``models`` and
``tasks``, which register their names with it. Importing the package alone registers nothing.
"""

from fairseq_posenc.user_dir import RegisteringPath
from fairseq_posenc.version import __version__

__all__ = ["__version__"]

# If a program has imported the package before, fairseq imports none of its modules: it only checks
# that `__path__` contains the --user-dir. At this check, RegisteringPath imports them.
__path__ = RegisteringPath(__path__)
