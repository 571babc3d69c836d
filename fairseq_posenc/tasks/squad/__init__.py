"""Registers the task and the criterion ``squad``, with which ``fairseq-posenc squad`` trains."""

from fairseq_posenc.tasks.squad import criterion, task

__all__ = ["criterion", "task"]
