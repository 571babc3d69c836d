#!/bin/sh
# BERT and DecBERT-Diff on 163 GB of text (arXiv:2204.08688, tables 4 and 7).
#   train_scripts/b_large.sh model.position_encoding=learned task.data=data-bin/pile model._name=decbert_diff
exec "$(dirname "$0")/train.sh" b_large "$@"
