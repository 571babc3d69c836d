"""GLUE in fairseq: sentence prediction that takes its classes from the data."""

from fairseq_posenc.tasks.glue import criterion, task

__all__ = ["criterion", "task"]
