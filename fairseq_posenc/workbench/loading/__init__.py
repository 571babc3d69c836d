"""Opens trained models, with their state, data, dictionaries and settings, for all commands."""

from fairseq_posenc.user_dir import register

register()  # our models and tasks, with fairseq
