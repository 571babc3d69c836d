#!/bin/sh
# BERT and DecBERT-Diff on 163 GB of text (arXiv:2204.08688, tables 4 and 7).
#   train_scripts/b_large.sh model.position_encoding=learned task.data=data-bin/pile model._name=decbert_diff
PATH=$PATH:$(dirname "$0")/../.venv/bin
exec fairseq-hydra-train --config-dir "$(dirname "$0")/configs" --config-name b_large "$@"
