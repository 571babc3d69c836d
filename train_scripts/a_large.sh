#!/bin/sh
# On from the released roberta.large (M4M, arXiv:2109.12788, table 7).
#   train_scripts/a_large.sh model.position_encoding=m4m task.data=data-bin/books-wiki-openwebtext
exec "$(dirname "$0")/train.sh" a_large "$@"
