"""Converts raw text to fairseq's data-bin; the programs in the folder above share these modules.

``fairseq-posenc preprocess`` puts that folder on the import path.

Text passes ``shards`` (files, and their division), ``sources`` (chunks of whole lines), ``formats``
(text in a line of a corpus), ``sentences`` (one sentence per line) and ``vocabulary`` (tokenizer,
dictionary). In the processes of a ``pool``, ``items`` converts a chunk. ``split`` writes train,
valid or test with ``store`` (fairseq's .bin and .idx). ``options`` has the settings; ``command``
runs it all.
"""

# Imported before fairseq, because it silences fairseq's warnings and shortens errors.
from fairseq_posenc.workbench.running import host  # noqa: F401
