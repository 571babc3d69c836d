"""Registers the task and the criterion ``glue``, with which ``fairseq-posenc glue`` trains."""

from fairseq_posenc.tasks.glue import criterion, task

__all__ = ["criterion", "task"]
