"""Position encodings for Transformers: for PyTorch (``api``), fairseq and transformers (``hf``).

fairseq loads the package with ``--user-dir fairseq_posenc`` and imports the modules of ``models``
and ``tasks``, which register their names. Importing the package alone registers nothing.
"""

from fairseq_posenc.user_dir import RegisteringPath
from fairseq_posenc.version import __version__

__all__ = ["__version__"]

# If the package is imported already, fairseq only checks that `__path__` contains its --user-dir.
# This list registers our names when it does.
__path__ = RegisteringPath(__path__)
