"""Opens trained models, with their state, data, dictionaries and settings, for all commands."""

# Imported before fairseq, to keep it quiet; registers models and tasks.
from fairseq_posenc.workbench.running import host  # noqa: F401
