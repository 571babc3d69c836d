"""Modules of ``mix.py``: ``draw`` samples documents, ``mixture`` reads and writes them."""
