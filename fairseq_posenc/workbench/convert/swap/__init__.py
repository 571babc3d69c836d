"""Gives a trained model other positions: ``fairseq-posenc swap``.

``command`` writes a new folder for a model of transformers. For a model of fairseq, ``checkpoint``
writes a start checkpoint, to which ``weights`` transfers the old weights.
"""
