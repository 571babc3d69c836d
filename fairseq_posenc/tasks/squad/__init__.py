"""SQuAD as fairseq trains it: windows, and where the answer begins and ends in each."""

from fairseq_posenc.tasks.squad import criterion, task

__all__ = ["criterion", "task"]
