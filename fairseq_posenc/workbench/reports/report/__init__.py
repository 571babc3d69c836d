"""Runs of one's own in the layouts of the papers' tables, with what differed.

``search`` finds them, ``training`` reads what a checkpoint tells, ``runs`` the figures,
``tables`` puts them beside the papers' numbers (``fairseq_posenc.workbench.training.recipes``),
``differences`` says what was not as in the paper, ``markdown`` writes it down.
"""
