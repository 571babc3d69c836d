"""Tokenizers with character offsets: for preprocessing, SQuAD, translation, compare.

``tokenizer`` is their interface, and loads that of a folder; ``gpt2`` is the byte-level BPE,
``pieces`` are sentencepieces, ``symbols`` are words and characters. ``files`` reads text.
"""
