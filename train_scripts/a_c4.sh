#!/bin/sh
# RoBERTa-M4M of base size on C4 (arXiv:2109.12788, table 6).
#   train_scripts/a_c4.sh m4m data-bin/c4 --init roberta.base.m4m.pt
PATH=$PATH:$(dirname "$0")/../.venv/bin
exec fairseq-posenc train-recipe a_c4 "$@"
