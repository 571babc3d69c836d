"""torch modules for models of any kind; :mod:`fairseq_posenc.api` exports the public ones."""
