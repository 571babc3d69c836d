"""fairseq in this process, with the plugin loaded: importing this module does it.

Programs of ours that use fairseq's code, and not its commands, import it before fairseq. So they
keep the logging that they have: fairseq, when it is imported, sets up one that shows every INFO.
"""

from __future__ import annotations

import logging

from fairseq_posenc.user_dir import USER_DIR, register

__all__ = ["USER_DIR"]

# fairseq asks for tensorboardX when it is imported; nothing here needs it.
logging.getLogger("fairseq.tasks.text_to_speech").setLevel(logging.WARNING)

_root = logging.getLogger()
_handlers, _level = _root.handlers[:], _root.level
register()
_root.handlers[:] = _handlers
_root.setLevel(_level)
