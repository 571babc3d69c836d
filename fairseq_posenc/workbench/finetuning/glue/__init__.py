"""GLUE: fine-tunes a pre-trained masked LM on eight tasks, and reports the results.

In the order in which a result passes them: ``configuration`` (the YAML files), ``plan`` (the runs
and their folders), ``worker`` (one run), ``workers`` and ``cluster`` (many of them), ``evaluation``
(a finished run), ``submission`` (GLUE's files), ``summary``, ``report``, ``command``. The tasks,
their data and metrics are in :mod:`fairseq_posenc.tasks.glue`.
"""
