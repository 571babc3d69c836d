#!/bin/sh
# The causal language model of DecBERT's paper (arXiv:2204.08688, table 1).
#   train_scripts/b_lm.sh 'rope(base=500000)' data-bin/wikitext-103 --gpus 2
PATH=$PATH:$(dirname "$0")/../.venv/bin
exec fairseq-posenc train-recipe b_lm "$@"
