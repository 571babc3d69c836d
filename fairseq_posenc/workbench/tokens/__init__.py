"""Tokenizers with character offsets: for preprocessing, SQuAD, translation, compare.

``tokenizer`` is their interface; ``gpt2`` is the byte-level BPE, ``pieces`` are sentencepieces,
``symbols`` are words and characters; ``loading`` finds which a folder has. ``files`` reads text.
"""
