"""GLUE: fine-tunes a pre-trained masked LM on eight tasks, and reports the results.

``command`` plans the ``runs``, on this machine or a cluster, and ``worker`` trains and evaluates
each; ``report`` writes the results. The tasks, their data and their metrics are in
:mod:`fairseq_posenc.tasks.glue`.
"""
