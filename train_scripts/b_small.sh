#!/bin/sh
# BERT and DecBERT on Wikipedia (arXiv:2204.08688, tables 2, 3 and 6).
#   train_scripts/b_small.sh learned data-bin/wiki --model decbert_diff
PATH=$PATH:$(dirname "$0")/../.venv/bin
exec fairseq-posenc train-recipe b_small "$@"
