"""The command ``compare``: trains models on a text, judges and reports them."""
