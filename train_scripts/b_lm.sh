#!/bin/sh
# The causal language model of DecBERT's paper (arXiv:2204.08688, table 1).
#   train_scripts/b_lm.sh -m model.position_encoding=learned,none task.data=data-bin/wikitext-103
exec "$(dirname "$0")/train.sh" b_lm "$@"
