#!/usr/bin/env bash
# Trains all models of one of the papers' ablations, one after the other, each in its own folder.
#
#   train_scripts/ablation.sh NAME DATA [OPTION...] [-- OPTION OF FAIRSEQ-TRAIN...]
#
#   train_scripts/ablation.sh scale_factor data-bin/books-wiki
#   train_scripts/ablation.sh layers data-bin/wiki --gpus 4
#   train_scripts/ablation.sh sinusoidal data-bin/wiki -- --max-update 40000
#
#   scale_factor    M4 with the scale factors 1, 2, 3, 4, 6 and 9 (M4M, table 3)
#   heads           M4 with a table for all heads of a layer, and with one for each (M4M, table 4)
#   layers          no layer, the first, the first two and the first three with a direction (DecBERT,
#                   section 3.2); the paper does not say which directions three layers had
#   sinusoidal      BERT with learned, sinusoidal and no positions (DecBERT, figure 5, of which the
#                   paper shows 40,000 updates)
#
# The models are those of a_small.sh and b_small.sh, with their options and in their folders, so that
# one that is finished there is not trained again.

set -euo pipefail
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

fail() {
    echo "ablation: error: $*" >&2
    exit 2
}

case ${1:-} in
-h | --help) sed -n '2,/^$/s/^# \{0,1\}//p' "$0" && exit ;;
scale_factor)
    script=a_small
    runs=(m4 'm4(scale_factor='{2,3,4,6,9}')')
    ;;
heads) script=a_small runs=(m4 'm4(per_head=true)') ;;
layers)
    script=b_small
    runs=('learned --model '{bert,decbert_first,decbert_{same,diff}{,_three}})
    ;;
sinusoidal) script=b_small runs=(learned sinusoidal none) ;;
*) fail "expected scale_factor, heads, layers or sinusoidal, not '${1:-}'; $0 --help tells more" ;;
esac
[ $# -ge 2 ] || fail "expected NAME DATA; $0 --help tells more"
data=$2
shift 2
case " $* " in *' --save-dir'* | *' --model'*)
    fail "--save-dir and --model are different for each model: leave them out" ;;
esac
for run in "${runs[@]}"; do
    read -ra words <<<"$run"
    "$HERE/$script.sh" "${words[0]}" "$data" ${words[@]+"${words[@]:1}"} "$@"
done
