"""Models for transformers, built on the library's encodings and backends.

:mod:`~fairseq_posenc.workbench.convert.exchange.standalone` copies these modules, and all that they
need of the library, into the source file of an exported folder.
"""
