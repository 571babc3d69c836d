"""Experiments: small models that differ only in their positions, trained with fairseq's commands.

The terms, each a class:

- A *variant* is a model to compare: a position encoding and attention directions (``variants``).
- A *run* identifies a training: variant, seed, and learning rate or task (``variants``).
- A *job* has the steps of a run, which train and test the model (``trainings``). The folder of a
  step has a stamp of its inputs, so the same command resumes where it was interrupted, and repeats
  only the steps whose inputs have changed (``running/jobs``).
- An *outcome* has the results of a run; of models of a text, a *seed aggregate* has those of all
  seeds (``outcomes``).
- An *experiment* has the user's choices. It prepares the data, runs all jobs and collects the
  *results* (``experiment``): on a text (``corpus``, ``text_experiment``), or on tasks (``probe``).
"""
