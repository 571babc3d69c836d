#!/bin/sh
# On from the released roberta.base (M4M, arXiv:2109.12788, tables 5 and 6).
#   train_scripts/a_base.sh model.position_encoding=m4m task.data=data-bin/books-wiki-openwebtext
PATH=$PATH:$(dirname "$0")/../.venv/bin
exec fairseq-hydra-train --config-dir "$(dirname "$0")/configs" --config-name a_base "$@"
