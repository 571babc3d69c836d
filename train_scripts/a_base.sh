#!/bin/sh
# On from the released roberta.base (M4M, arXiv:2109.12788, tables 5 and 6).
#   train_scripts/a_base.sh model.position_encoding=m4m task.data=data-bin/books-wiki-openwebtext
exec "$(dirname "$0")/train.sh" a_base "$@"
