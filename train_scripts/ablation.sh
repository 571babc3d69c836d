#!/bin/sh
# All models of one of the papers' ablations, one after the other.
#   train_scripts/ablation.sh scale_factor data-bin/books-wiki
PATH=$PATH:$(dirname "$0")/../.venv/bin
exec fairseq-posenc ablation "$@"
