r"""Converts WikiExtractor's text files (AA/wiki_00 ...) to a fairseq data-bin.

Each article is between <doc ...> and </doc>; its first line is the title.

  python -m wikiextractor.WikiExtractor enwiki-latest-pages-articles.xml.bz2 -o extracts
  fairseq-posenc preprocess wikipedia --train extracts/ --out data-bin/wiki \
      --encoder-json encoder.json --vocab-bpe vocab.bpe --dict dict.txt \
      --sentences --longest-line 511
"""

from functools import partial

from binarize import command, formats, options

add_arguments = options.add_arguments
run = partial(command.run, line_format=formats.wikipedia)
