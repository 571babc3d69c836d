#!/bin/sh
# BERT and DecBERT on Wikipedia (arXiv:2204.08688, tables 2, 3 and 6).
#   train_scripts/b_small.sh model.position_encoding=learned task.data=data-bin/wiki model._name=decbert_diff
exec "$(dirname "$0")/train.sh" b_small "$@"
