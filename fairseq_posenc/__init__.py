"""Position encodings for Transformers: for PyTorch (``api``), fairseq and transformers (``hf``).

fairseq loads the package with ``--user-dir fairseq_posenc`` and imports the modules of ``models``
and ``tasks``, which register their names. Importing the package registers nothing.
"""

from fairseq_posenc.user_dir import PackagePath
from fairseq_posenc.version import __version__

__all__ = ["__version__"]

__path__ = PackagePath(__path__)  # by which fairseq recognises its --user-dir
