#!/bin/sh
# All models of one of the papers' ablations, one after the other: scale_factor, heads, layers, sinusoidal.
#   train_scripts/ablation.sh scale_factor task.data=data-bin/books-wiki
set -eu
name=${1:?say which: scale_factor, heads, layers or sinusoidal}
shift
exec "$(dirname "$0")/train.sh" "ablation_$name" "$@"
