#!/bin/sh
# RoBERTa-M4M of base size on C4 (arXiv:2109.12788, table 6).
#   train_scripts/a_c4.sh model.position_encoding=m4m task.data=data-bin/c4
exec "$(dirname "$0")/train.sh" a_c4 "$@"
