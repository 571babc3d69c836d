"""Position encodings as parts of fairseq's Transformers: load with ``--user-dir fairseq_posenc``.

Importing the package registers its models with fairseq and prepares fairseq's commands: safe
loading of checkpoints, an error for a checkpoint that does not exist, and one-line error messages.
"""

import logging

# fairseq asks for tensorboardX when it is imported; nothing here needs it.
logging.getLogger("fairseq.tasks.text_to_speech").setLevel(logging.WARNING)

from fairseq_posenc.checkpoints import allow_safe_classes, guard_checkpoints
from fairseq_posenc.errors import install_excepthook
from fairseq_posenc.glue import prediction as glue_task  # and its criterion
from fairseq_posenc.models import causal_lm, masked_lm, translation
from fairseq_posenc.squad import criterion as squad_criterion
from fairseq_posenc.squad import task as squad_task
from fairseq_posenc.version import __version__

__all__ = [
    "__version__",
    "causal_lm",
    "glue_task",
    "masked_lm",
    "squad_criterion",
    "squad_task",
    "translation",
]

allow_safe_classes()
guard_checkpoints()
install_excepthook()
