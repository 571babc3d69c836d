"""Small models trained on one text, alike but for their positions, with fairseq's own commands.

The words, each a class:

- A *variant* is a model to compare: a position encoding and its directions (``variants``).
- A *run* names one training: variant, seed, and learning rate, or task of a probe (``variants``).
- A *job* has the steps of a run, which train and measure its model (``trainings``). A step leaves a
  folder with a stamp of what it was made from, so that the same command, given again, continues
  where it was stopped and repeats only what has changed (``running/jobs``).
- An *outcome* is what came out of a run, a *seed aggregate* those of all seeds (``outcomes``).
- An *experiment* prepares the data, has all jobs done and collects the *results*
  (``experiment``): on a text (``corpus``, ``text_experiment``), or on tasks (``probe``).
"""
