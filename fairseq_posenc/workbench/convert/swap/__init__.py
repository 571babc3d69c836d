"""A trained model with other positions, as a start checkpoint.

``new_model`` builds the wanted model at the source's size, ``weights`` gives it the source's
weights, ``position_parameters`` finds the source of each position parameter, ``command`` writes the
checkpoint.
"""
