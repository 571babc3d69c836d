"""GLUE as fairseq trains it: sentence prediction that the data tells what to predict."""

from fairseq_posenc.tasks.glue import criterion, task

__all__ = ["criterion", "task"]
