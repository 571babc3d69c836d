#!/bin/sh
# RoBERTa-base with an encoding of your choice, as M4M's paper compares them (arXiv:2109.12788, table 2).
#   train_scripts/a_small.sh m4m data-bin/books-wiki
PATH=$PATH:$(dirname "$0")/../.venv/bin
exec fairseq-posenc train-recipe a_small "$@"
