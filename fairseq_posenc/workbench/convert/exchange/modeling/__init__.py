"""Models for transformers on the library's encodings and backends.

Nothing here is imported: :mod:`~fairseq_posenc.workbench.convert.exchange.standalone` writes these
modules, and what they need of the library, into the one file of an exported folder.
"""
