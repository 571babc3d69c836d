"""Tokenizers with character offsets: for preprocessing, SQuAD, translation, compare.

``gpt2`` is the byte-level BPE, ``pieces`` are sentencepieces, ``symbols`` are words and characters;
``numbers`` is their interface, ``offsets`` finds tokens in the text. ``learning`` trains
sentencepieces, ``lines`` and ``files`` read text.
"""
