#!/bin/sh
# RoBERTa-base with an encoding of your choice, as M4M's paper compares them (arXiv:2109.12788, table 2).
#   train_scripts/a_small.sh -m model.position_encoding=learned,shaw,m4m task.data=data-bin/books-wiki
exec "$(dirname "$0")/train.sh" a_small "$@"
