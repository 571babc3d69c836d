#!/bin/sh
# French to English, IWSLT 2017, three times with other seeds; how to find N: configs/translation_iwslt17.yaml.
#   train_scripts/translation_iwslt17.sh -m model.position_encoding=rope task.data=data-bin/iwslt17.fr-en \
#       optimization.max_update=N common.seed=1,2,3
exec "$(dirname "$0")/train.sh" translation_iwslt17 "$@"
