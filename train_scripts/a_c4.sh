#!/bin/sh
# RoBERTa-M4M of base size on C4 (arXiv:2109.12788, table 6).
#   train_scripts/a_c4.sh model.position_encoding=m4m task.data=data-bin/c4
PATH=$PATH:$(dirname "$0")/../.venv/bin
exec fairseq-hydra-train --config-dir "$(dirname "$0")/configs" --config-name a_c4 "$@"
