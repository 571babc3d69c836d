"""Opens trained models, with their state, data, dictionaries and settings, for all commands."""
