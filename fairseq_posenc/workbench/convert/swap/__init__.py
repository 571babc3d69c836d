"""Gives a trained model other positions: ``fairseq-posenc swap``.

``command`` writes a new folder if the model is one of transformers, ``checkpoint`` a start
checkpoint if it is one of fairseq, to which ``weights`` transfers the old weights.
"""
