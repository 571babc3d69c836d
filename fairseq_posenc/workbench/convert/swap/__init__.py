"""A trained model with other positions, as a start checkpoint or a folder of transformers.

``new_model`` builds the wanted model at the source's size, ``weights`` gives it the source's
weights, ``position_parameters`` finds the source of each position parameter, ``fairseq_checkpoint``
writes the checkpoint; ``hf_folder`` does all of it for a folder of transformers.
"""
