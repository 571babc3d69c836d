"""Importing this module imports fairseq quietly, and registers the plugin.

Import it before ``fairseq`` in each module that calls fairseq's code: fairseq's import makes the
root logger show every INFO message, and this module puts the logger back. Modules that only start
fairseq's commands need it for ``USER_DIR`` alone, the value of ``--user-dir``.
"""

import logging

from fairseq_posenc.user_dir import USER_DIR, register

__all__ = ["USER_DIR"]

# fairseq's import warns that tensorboardX is missing, which nothing here needs.
logging.getLogger("fairseq.tasks.text_to_speech").setLevel(logging.WARNING)

_root = logging.getLogger()
_handlers = _root.handlers[:]
_level = _root.level
register()  # imports fairseq
_root.handlers[:] = _handlers
_root.setLevel(_level)
