#!/bin/sh
# French to English, IWSLT 2017, three times with other seeds; says which is best.
#   train_scripts/translation_iwslt17.sh rope data-bin/iwslt17.fr-en
PATH=$PATH:$(dirname "$0")/../.venv/bin
exec fairseq-posenc train-recipe translation_iwslt17 "$@"
