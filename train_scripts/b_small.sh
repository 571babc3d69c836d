#!/usr/bin/env bash
# Pre-trains BERT and DecBERT of base size on Wikipedia (Luo et al. 2022, arXiv:2204.08688, tables 2,
# 3 and 6), with learned positions, without any, or with an encoding of your choice.
#
#   train_scripts/b_small.sh ENCODING DATA [OPTION...] [-- OPTION OF FAIRSEQ-TRAIN...]
#
#   train_scripts/b_small.sh learned data-bin/wiki --model decbert_diff
#   train_scripts/b_small.sh none data-bin/wiki --model decbert_same
#   train_scripts/b_small.sh learned data-bin/wiki
#
# The paper: 158.4M sentences, 4 A100-40GB, 34.5 hours. Batch: 256 sequences.
#
#   --model NAME    bert (default), decbert_same (the first two layers see what is on the left) or
#                   decbert_diff (the first sees what is on the left, the second what is on the right);
#                   decbert_first has one such layer, decbert_same_three and decbert_diff_three (left,
#                   right, left) have three

set -euo pipefail
. "$(dirname "$0")/common.sh"

PER_GPU=16 MODEL=bert
read_arguments "$@"
share_batch 256 sequences
. "$HERE/masked_lm.sh"

read -ra named <<<"$(model_options)"
model=(
    "${named[@]}" --position-encoding "$ENCODING"
    --encoder-layers 12 --encoder-embed-dim 768 --encoder-ffn-embed-dim 3072
    --encoder-attention-heads 12 --dropout 0.1
    --attention-dropout 0.1 --activation-fn gelu # not in the paper: RoBERTa's
)
optimizer=(
    --optimizer adam --adam-betas '(0.9, 0.98)' --adam-eps 1e-6
    --weight-decay 0.01 --clip-norm 0.5
    --lr 1e-4 --lr-scheduler polynomial_decay
    --warmup-updates 10000 --total-num-update 200000 --max-update 200000 --seed 1
)
train "${model[@]}" "${batches[@]}" "${optimizer[@]}" "${files[@]}"
