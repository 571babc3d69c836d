"""Tokenizes text, with character offsets: for preprocessing, SQuAD, translate and compare.

``tokenizer`` encodes words and characters and writes tokens, ``subwords`` encodes with GPT-2's BPE
or sentencepieces. ``files`` reads text, ``squad_file`` and ``squad_windows`` SQuAD's questions.
"""
