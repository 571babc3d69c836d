"""Ways to compute attention from declared terms; :mod:`~fairseq_posenc.backends.planner` picks."""

from fairseq_posenc.backends.planner import BACKENDS, Plan, attend, available, check, choose

__all__ = ["BACKENDS", "Plan", "attend", "available", "check", "choose"]
