"""Registers the task and the criterion ``glue``, with which ``fairseq-posenc glue`` trains."""

import fairseq_posenc.tasks.glue.task  # noqa: F401
