#!/bin/sh
# RoBERTa-base without positions, or sentence by sentence: both fail (arXiv:2109.12788, section 5.2).
#   train_scripts/a_none.sh sentence_learned data-bin/books-wiki
PATH=$PATH:$(dirname "$0")/../.venv/bin
exec fairseq-posenc train-recipe a_none "$@"
