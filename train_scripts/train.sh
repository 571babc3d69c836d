#!/bin/sh
# Trains a configuration of configs/ by fairseq-hydra-train; further words change its settings.
#   train_scripts/train.sh laptop model.position_encoding=m4m
configs=$(dirname "$0")/configs
[ -f "$configs/${1:?say which configuration: laptop, laptop_lm, ...}.yaml" ] || {
    echo "train.sh: error: there is no $configs/$1.yaml: name a file of that folder, without .yaml" >&2
    exit 2
}
name=$1
shift
PATH=$PATH:$(dirname "$0")/../.venv/bin
# What hydra and torch remark on fairseq's code at each start.
quiet=ignore::UserWarning:sys,ignore::UserWarning:hydra.main,ignore::UserWarning:hydra._internal.utils
quiet=$quiet,ignore::UserWarning:fairseq_cli.hydra_train,ignore::FutureWarning:fairseq.tasks.fairseq_task
quiet="$quiet,ignore:'pin_memory' argument:UserWarning:torch.utils.data.dataloader"
export PYTHONWARNINGS="$quiet${PYTHONWARNINGS:+,$PYTHONWARNINGS}"
exec fairseq-hydra-train --config-dir "$configs" --config-name "$name" "$@"
