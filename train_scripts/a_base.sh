#!/bin/sh
# On from the released roberta.base (M4M, arXiv:2109.12788, tables 5 and 6).
#   train_scripts/a_base.sh m4m data-bin/books-wiki-openwebtext --init roberta.base.m4m.pt
PATH=$PATH:$(dirname "$0")/../.venv/bin
exec fairseq-posenc train-recipe a_base "$@"
