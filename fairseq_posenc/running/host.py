"""fairseq in this process, with the plugin loaded: importing this module does it.

Programs of ours that use fairseq's code, and not its commands, import it before fairseq.
"""

from __future__ import annotations

import logging
from pathlib import Path

import fairseq_posenc
from fairseq_posenc.user_dir import register

USER_DIR = Path(fairseq_posenc.__file__).resolve().parent

# fairseq asks for tensorboardX when it is imported; nothing here needs it.
logging.getLogger("fairseq.tasks.text_to_speech").setLevel(logging.WARNING)
register()
