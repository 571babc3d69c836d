"""One file for each position encoding; :mod:`fairseq_posenc.registry` finds them here."""
