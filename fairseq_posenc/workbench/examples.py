"""The examples that end each command's help; a test parses them all.

``EXAMPLES["list"]`` has the examples of ``fairseq-posenc list``, ``EXAMPLES["squad train"]`` of a
subcommand.
"""

from argparse import ArgumentParser

# Lines indented by two spaces are examples of the command above; a backslash continues a line.
_TEXT = r"""
user-dir
  fairseq-eval-lm data-bin/wiki --user-dir "$(fairseq-posenc user-dir)" --path rope.pt \
    --tokens-per-sample 16
list
  fairseq-posenc list
describe
  fairseq-posenc describe m4m
count
  fairseq-posenc count --encoding t5 --layers 24 --embed-dim 1024 --heads 16
compare
  fairseq-posenc compare --text book.txt --encodings learned,m4m --out m4m
choose
  fairseq-posenc choose --family causal-lm --length 1024 --trained 512
learning-curves
  fairseq-posenc learning-curves rope=rope.log --updates 0:16000 --out begin
translate
  fairseq-posenc translate --checkpoint fr-en.pt --data data-bin/fr-en "Un homme dort."
  fairseq-posenc translate --checkpoint fr-en.pt --plain --bf16 "Un homme dort."
bleu
  fairseq-posenc bleu rope=fr-en.pt old=old.en --split test --beam 4
lm-length
  fairseq-posenc lm-length --text my.txt --lengths 16,64 --stride 16 own=my-lm \
    'yarn=my-lm@own(scaling=yarn:4)'
swap
  fairseq-posenc swap --checkpoint my-model --position-encoding own+sink --out new-model
squad
  fairseq-posenc squad train --help
squad train
  fairseq-posenc squad train --checkpoint roberta.base/model.pt --data data-bin/squad20 --out slow \
    --set optimization.lr=[1e-5]
squad predict
  fairseq-posenc squad predict --checkpoint squad/checkpoint_last.pt --questions dev-v2.0.json \
    --out squad/dev --bf16
squad score
  fairseq-posenc squad score dev-v2.0.json squad/dev/answers.json --na-prob-file \
    squad/dev/null_odds.json --na-prob-thresh 0
preprocess
  fairseq-posenc preprocess plain_text --train a.txt --valid b.txt --words --out data-bin/text
glue
  fairseq-posenc glue --checkpoint bert.pt --data data-bin/glue --protocol m4m --tasks CoLA \
    --dry-run
  fairseq-posenc glue --checkpoint bert.pt --data data-bin/glue --protocol decbert --tasks CoLA \
    --seeds 1 --set model.dropout=0.2
report
  fairseq-posenc report checkpoints/ --json
plot
  fairseq-posenc plot table --encoding sinusoidal --out sinusoidal.png
  fairseq-posenc plot scores --checkpoint alibi.pt --out alibi.svg
  fairseq-posenc plot attention --checkpoint rope.pt --text 'w1 w2 w3' --out rope.png
inspect
  fairseq-posenc inspect --checkpoint rope.pt --checkpoint alibi.pt --text 'w1 w2 w3' --out \
    both.html
export
  fairseq-posenc export --checkpoint bert.pt --out for-transformers
  fairseq-posenc export --checkpoint fr-en.pt --out engine --to ctranslate2 --quantization int8
import
  fairseq-posenc import --from my-model --out start.pt
doctor
  fairseq-posenc doctor
"""

EXAMPLES: dict[str, list[str]] = {}
_command = ""
for _line in _TEXT.replace("\\\n    ", "").strip().splitlines():
    if _line.startswith("  "):
        EXAMPLES[_command].append(_line.strip())
    else:  # a command, whose examples follow
        _command = _line
        EXAMPLES[_command] = []


def add_examples(parser: ArgumentParser, command: str) -> None:
    """End the help with a command's examples."""
    examples = "\n  ".join(["examples:", *EXAMPLES[command]])
    parser.epilog = "\n\n".join(filter(None, [parser.epilog, examples]))
