"""The command ``compare``: runs a text experiment, shows it live, and reports it."""
