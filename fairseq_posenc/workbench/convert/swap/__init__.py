"""A trained model with other positions, as a start checkpoint.

``target`` makes the wanted model at the source's size, ``matching`` gives it the source's weights,
``finding`` says of each position parameter where it is from, ``command`` writes the checkpoint.
"""
