"""From raw text to fairseq's data-bin: what the programs beside this folder share.

The parts, in the order in which text passes them: ``shards`` (which bytes of which files),
``sources`` (chunks of whole lines), ``formats`` (what a line of a corpus holds), ``sentences`` (one
sentence a line), ``vocabulary`` (which of :mod:`fairseq_posenc.tokens` makes them numbers),
``lengths`` (long lines, ends of documents), ``items`` (all of that for one chunk, in a process of a
``pool``), ``store`` (fairseq's .bin and .idx), ``split`` (train, valid or test, resumable),
``options`` and ``command`` (what the programs share).
"""

from fairseq_posenc.running import host  # noqa: F401  (before fairseq: keeps it quiet, errors short)
