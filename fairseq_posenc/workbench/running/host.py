"""Importing this module imports fairseq and registers the plugin, without fairseq's logging.

Modules that call fairseq's code, not its commands, import this one before fairseq: fairseq's import
configures the root logger to show every INFO message, and this module restores it.
"""

import logging

from fairseq_posenc.user_dir import USER_DIR, register

__all__ = ["USER_DIR"]

# fairseq's import warns that tensorboardX is missing, which nothing here needs.
logging.getLogger("fairseq.tasks.text_to_speech").setLevel(logging.WARNING)

_root = logging.getLogger()
_handlers = _root.handlers[:]
_level = _root.level
register()
_root.handlers[:] = _handlers
_root.setLevel(_level)
