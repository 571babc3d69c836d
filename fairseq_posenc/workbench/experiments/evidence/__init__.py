"""The evidence of ``choose``, made of the records in ``docs/results``.

``measured`` reads the figures, ``tables`` sets them side by side. A figure that no record has is
"not measured".
"""
