"""Position encodings as parts of Transformers: a library for PyTorch, and a plugin for fairseq.

:mod:`fairseq_posenc.api` is the library. fairseq takes the package as ``--user-dir
fairseq_posenc``: it imports the modules of ``models`` and ``tasks`` itself, which register their
names. Importing the package does nothing else.
"""

from fairseq_posenc.user_dir import PackagePath
from fairseq_posenc.version import __version__

__all__ = ["__version__"]

__path__ = PackagePath(__path__)
