"""Registers the task and the criterion ``squad``, with which ``fairseq-posenc squad`` trains."""

import fairseq_posenc.tasks.squad.criterion
import fairseq_posenc.tasks.squad.task  # noqa: F401
