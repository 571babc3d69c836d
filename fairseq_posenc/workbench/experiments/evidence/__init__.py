"""What was measured of each encoding, read from the records in ``docs/results``.

``measured`` finds the figure of an encoding for a question; ``page`` makes ``docs/choose.md``, and
``picture`` its pictures.

A figure that no record has is "not measured", here and in what is made of it.
"""
