"""Runs of one's own in the layouts of the papers' tables, with what differed.

``command`` finds results; ``checkpoint``, ``trainings`` and ``runs`` read them; ``tables`` sets
them beside the papers' figures (``fairseq_posenc.workbench.training.recipes``), ``differences``
lists the deviations from a paper's set-up, ``markdown`` formats all of it.
"""
