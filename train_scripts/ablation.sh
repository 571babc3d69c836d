#!/bin/sh
# All models of one of the papers' ablations, one after the other: scale_factor, heads, layers, sinusoidal.
#   train_scripts/ablation.sh scale_factor task.data=data-bin/books-wiki
name=${1:-}
[ $# -eq 0 ] || shift
exec "$(dirname "$0")/train.sh" "ablation_$name" "$@"
