"""Text to pieces and back, with character offsets: for preprocessing, SQuAD, translation, compare.

``gpt2`` is the byte-level BPE, ``pieces`` are sentencepieces, ``symbols`` are words and characters;
each becomes ``numbers`` of fairseq's dictionary, and ``offsets`` where a text must be found again.
``learning`` makes sentencepieces, ``lines`` and ``files`` read text.
"""
