r"""Converts WikiText-2 or WikiText-103 to a fairseq data-bin: train, valid and test.

A line is a paragraph, a heading between equal signs, or empty. By default all lines become items,
the empty ones too, as in fairseq's recipes for its language models and RoBERTa. With --articles
there is an empty item only at the end of an article. For GPT-2 BPE take the raw files
(wikitext-103-raw), which have no <unk>; for --words take the files with <unk>.

  fairseq-posenc preprocess wikitext --train wiki.train.raw --valid wiki.valid.raw \
      --test wiki.test.raw --out data-bin/wikitext-103 \
      --encoder-json encoder.json --vocab-bpe vocab.bpe --dict dict.txt
"""

import sys

from binarize import command, formats, options
from fairseq_posenc.workbench.running.exit_codes import run_main


def main() -> None:
    """Run the program."""
    parser = options.make_parser(__doc__)
    parser.set_defaults(empty_lines=None)  # until it is given
    add = parser.add_argument
    add("--articles", action="store_true", help="write an empty item only between articles")
    add("--no-headings", action="store_true", help="drop the headings")
    args = parser.parse_args()
    args.empty_lines = args.empty_lines or ("documents" if args.articles else "keep")
    command.run(args, formats.WikiText(args.articles, not args.no_headings))


if __name__ == "__main__":
    sys.exit(run_main(main))
