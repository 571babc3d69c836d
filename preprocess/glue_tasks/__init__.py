"""Parts of ``glue.py``: ``rows`` reads GLUE's files, ``cutting`` shortens, ``binary`` writes."""

import fairseq_posenc  # noqa: F401  (before fairseq: it keeps fairseq quiet, and errors short)
