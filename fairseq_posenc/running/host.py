"""Kept for a release: :mod:`fairseq_posenc.workbench.running.host` is the place."""

from fairseq_posenc.workbench.running import host  # noqa: F401  (registers models and tasks)
