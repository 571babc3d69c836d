#!/bin/sh
# On from the released roberta.large (M4M, arXiv:2109.12788, table 7).
#   train_scripts/a_large.sh m4m data-bin/books-wiki-openwebtext --init roberta.large.m4m.pt
PATH=$PATH:$(dirname "$0")/../.venv/bin
exec fairseq-posenc train-recipe a_large "$@"
