"""Opens folders of transformers for commands, after a check, and captures their attention."""
