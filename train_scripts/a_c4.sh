#!/usr/bin/env bash
# Pre-trains RoBERTa-M4M of base size on C4 (Huang et al. 2021, arXiv:2109.12788, section 5.6,
# table 6: RoBERTa-M4M (C4 en)).
#
#   train_scripts/a_c4.sh ENCODING DATA [OPTION...] [-- OPTION OF FAIRSEQ-TRAIN...]
#
#   train_scripts/a_c4.sh m4m data-bin/c4 --init roberta.base.m4m.pt
#
# The paper: 800 GB of text. Batch, updates and GPUs are taken from its other models of base size:
# 480 sequences, 32 A100-40GB. It does not say whether this one, too, starts from roberta.base.
#
#   --init FILE     the checkpoint to start from, made from a released RoBERTa by
#                   'fairseq-posenc init'; without one the weights are new

set -euo pipefail
. "$(dirname "$0")/common.sh"

PER_GPU=16 INIT=optional
read_arguments "$@"
share_batch 480 sequences
. "$HERE/masked_lm.sh"

model=(
    --arch roberta_none --position-encoding "$ENCODING"
    --encoder-layers 12 --encoder-embed-dim 768 --encoder-ffn-embed-dim 3072
    --encoder-attention-heads 12
)
optimizer=(--optimizer adam --lr 1e-4 --max-update 500000)
# The paper does not give these; they are RoBERTa's (arXiv:1907.11692, table 9).
optimizer+=(
    --dropout 0.1 --attention-dropout 0.1 --activation-fn gelu
    --adam-betas '(0.9, 0.98)' --adam-eps 1e-6 --weight-decay 0.01 --clip-norm 0.0
    --lr-scheduler polynomial_decay --warmup-updates 24000 --total-num-update 500000 --seed 1
)
train "${model[@]}" "${batches[@]}" "${optimizer[@]}" "${files[@]}"
