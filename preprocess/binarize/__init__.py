"""Converts raw text to fairseq's data-bin; the programs in the folder above share these modules.

Text passes ``shards`` (files, and their division), ``sources`` (chunks of whole lines), ``formats``
(text in a line of a corpus), ``sentences`` (one sentence per line) and ``vocabulary`` (tokenizer
and dictionary). In the processes of a ``pool``, ``items`` does this for a chunk. ``split`` writes
train, valid or test with ``store`` (fairseq's .bin and .idx). ``options`` and ``command`` hold the
settings and run it all.
"""

# Imported before fairseq, because it silences fairseq's warnings and shortens errors.
from fairseq_posenc.workbench.running import host  # noqa: F401
