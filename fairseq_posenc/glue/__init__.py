"""GLUE: fine-tuning of a pre-trained masked LM on eight tasks, and what came of it.

The parts, in the order in which a result passes them: ``tasks`` (what the tasks are), ``data`` (a
task's data-bin), ``prediction`` and ``criterion`` (fairseq's task and loss for it), ``metrics``,
``configuration`` (the YAML files), ``plan`` (which runs,
in which folders), ``worker`` (one run), ``workers`` and ``cluster`` (many of them), ``evaluation``
(a finished run), ``submission`` (GLUE's files), ``summary``, ``report``, ``command``.
"""
