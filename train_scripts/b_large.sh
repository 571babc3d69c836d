#!/usr/bin/env bash
# Pre-trains BERT and DecBERT-Diff of base size on 163 GB of text (Luo et al. 2022, arXiv:2204.08688,
# tables 4 and 7).
#
#   train_scripts/b_large.sh ENCODING DATA [OPTION...] [-- OPTION OF FAIRSEQ-TRAIN...]
#
#   train_scripts/b_large.sh learned data-bin/pile --model decbert_diff
#   train_scripts/b_large.sh learned data-bin/pile
#
# The paper: 8 A100-40GB, 15 days. Batch: 4096 sequences. Its table has 500k updates, its text 300k:
# the rate falls as if there were 500k, and training ends after 300k.
#
#   --model NAME    bert (default), decbert_same or decbert_diff: see b_small.sh

set -euo pipefail
. "$(dirname "$0")/common.sh"

PER_GPU=32 MODEL=bert SAVE_EVERY=1000 # an hour, in the paper's speed
read_arguments "$@"
share_batch 4096 sequences
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
    --weight-decay 0.01 --clip-norm 2.0
    --lr 3e-4 --lr-scheduler tri_stage --warmup-steps 24000 --max-update 300000
)
# Not in the paper. tri_stage is fairseq's, so the scales are its defaults: up from a hundredth of the
# rate, exponentially down to a hundredth at update 500k; no plateau between.
optimizer+=(
    --hold-steps 0 --decay-steps 476000 --init-lr-scale 0.01 --final-lr-scale 0.01 --seed 1
)
train "${model[@]}" "${batches[@]}" "${optimizer[@]}" "${files[@]}"
