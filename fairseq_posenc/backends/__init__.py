"""Ways to compute attention from declared terms; :mod:`~fairseq_posenc.backends.planner` picks."""

from fairseq_posenc.backends.planner import BACKENDS, attend, available, check, choose

__all__ = ["BACKENDS", "attend", "available", "check", "choose"]
