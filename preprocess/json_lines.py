r"""Converts lines of JSON (C4, the Pile, WikiExtractor --json) to a fairseq data-bin.

A line is an object; one of its fields holds a document. Rows of Parquet files work the same.

  fairseq-posenc preprocess json_lines --train c4/c4-train.*.json.gz --out data-bin/c4 \
      --valid c4/c4-validation.00000-of-00008.json.gz \
      --encoder-json encoder.json --vocab-bpe vocab.bpe --dict dict.txt \
      --sentences --longest-line 511 --shard 3 --num-shards 16
"""

import sys

from binarize import command, formats, options
from fairseq_posenc.workbench.running.exit_codes import run_main


def main() -> None:
    """Run the program."""
    parser = options.make_parser(__doc__)
    add = parser.add_argument
    add("--field", default="text", help="field with the document (default: %(default)s)")
    text = "keep only objects with this value, as in meta.pile_set_name=Pile-CC"
    add("--where", metavar="FIELD=VALUE", help=text)
    args = parser.parse_args()
    command.run(args, formats.JsonField(args.field, formats.parse_where(args.where)))


if __name__ == "__main__":
    sys.exit(run_main(main))
