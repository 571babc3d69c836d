"""SQuAD in fairseq: windows, with the start and the end of the answer in each."""

from fairseq_posenc.tasks.squad import criterion, task

__all__ = ["criterion", "task"]
