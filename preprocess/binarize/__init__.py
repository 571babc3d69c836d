"""From raw text to fairseq's data-bin: the modules that the programs beside this folder share.

In the order in which text passes them: ``sources`` (files, and chunks of whole lines), ``formats``
(text in a line of a corpus), ``sentences`` (one sentence a line), ``vocabulary`` (tokenizer and
dictionary), ``items`` (all of that for one chunk, in a process of a ``pool``), ``store`` (fairseq's
.bin and .idx), ``split`` (train, valid or test, resumable), ``options`` and ``command`` (settings
and programs).
"""

from fairseq_posenc.workbench.running import host  # noqa: F401  (before fairseq: keeps it quiet, errors short)
