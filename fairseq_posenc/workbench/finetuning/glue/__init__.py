"""GLUE: fine-tunes a pre-trained masked LM on eight tasks, and reports the results.

``command`` plans the ``runs``, here or on a cluster, each made by a ``worker``;
``report`` and ``submission`` write what came out. The tasks, their data and metrics are in
:mod:`fairseq_posenc.tasks.glue`.
"""
