#!/bin/sh
# RoBERTa-base without positions, or sentence by sentence: both fail (arXiv:2109.12788, section 5.2).
#   train_scripts/a_none.sh model.position_encoding=sentence_learned task.data=data-bin/books-wiki
exec "$(dirname "$0")/train.sh" a_none "$@"
