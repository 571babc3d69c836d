r"""Converts plain text (BooksCorpus, OpenWebText, any other text) to a fairseq data-bin.

A line is a paragraph or a sentence; an empty line or the end of a file ends a document.

  fairseq-posenc preprocess plain_text --train books/ --valid valid.txt --out data-bin/books \
      --encoder-json encoder.json --vocab-bpe vocab.bpe --dict dict.txt \
      --sentences --longest-line 511
"""

from functools import partial

from binarize import command, formats, options

add_arguments = options.add_arguments
run = partial(command.run, line_format=formats.plain)
