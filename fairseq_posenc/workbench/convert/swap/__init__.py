"""Gives a trained model other positions: ``fairseq-posenc swap``.

``new_model`` builds the new model in the size of the old one (the *source*), ``weights`` gives it
the source's weights, ``position_parameters`` finds the source's values for position parameters, and
``fairseq_checkpoint`` writes a start checkpoint. ``hf_folder`` does all this for a folder of
transformers.
"""
