"""Tokenizes text, with character offsets: for preprocessing, SQuAD, translation and compare.

``tokenizer`` is the interface, ``gpt2`` the byte-level BPE, ``pieces`` are sentencepieces,
``symbols`` words and characters. ``files`` reads text, ``data_set`` writes tokens.
"""
