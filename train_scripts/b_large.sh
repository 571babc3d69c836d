#!/bin/sh
# BERT and DecBERT-Diff on 163 GB of text (arXiv:2204.08688, tables 4 and 7).
#   train_scripts/b_large.sh learned data-bin/pile --model decbert_diff
PATH=$PATH:$(dirname "$0")/../.venv/bin
exec fairseq-posenc train-recipe b_large "$@"
