"""The tables and pictures of ``docs/choose.md``, made of the records in ``docs/results``.

``measured`` reads the figures; ``page`` writes the tables, ``picture`` draws them. A figure that no
record has is "not measured".
"""
