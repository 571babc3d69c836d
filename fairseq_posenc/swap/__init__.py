"""A trained model with other positions, as a start checkpoint.

``target`` makes the wanted model at the source's size,
``matching`` gives it the source's weights and says of each position parameter where it is from,
with ``extending`` for longer tables and ``layouts`` for the order of coordinates, and
``command`` writes the checkpoint.
"""
