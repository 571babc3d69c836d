"""Tokenizes text, with character offsets: for preprocessing, SQuAD, translate and compare.

``tokenizer`` encodes words and characters and writes tokens, ``subwords`` are those of GPT-2 and of
sentencepiece. ``files`` reads text, ``squad_file`` and ``squad_windows`` SQuAD's questions.
"""
