#!/bin/sh
# RoBERTa-base with an encoding of your choice, as M4M's paper compares them (arXiv:2109.12788, table 2).
#   train_scripts/a_small.sh -m model.position_encoding=learned,shaw,m4m task.data=data-bin/books-wiki
PATH=$PATH:$(dirname "$0")/../.venv/bin
exec fairseq-hydra-train --config-dir "$(dirname "$0")/configs" --config-name a_small "$@"
