#!/usr/bin/env bash
# Goes on with the pre-training of the released roberta.large, with M4M (Huang et al. 2021,
# arXiv:2109.12788, section 5.7, table 7).
#
#   train_scripts/a_large.sh ENCODING DATA --init FILE [OPTION...] [-- OPTION OF FAIRSEQ-TRAIN...]
#
#   train_scripts/a_large.sh m4m data-bin/books-wiki-openwebtext --init roberta.large.m4m.pt
#
# The paper: 54 GB of text, 32 A100-40GB. Batch: 192 sequences.
#
#   --init FILE     the checkpoint to start from, made from a released RoBERTa by
#                   'fairseq-posenc init'; needed for the first start alone

set -euo pipefail
. "$(dirname "$0")/common.sh"

PER_GPU=8 INIT=required
read_arguments "$@"
share_batch 192 sequences
. "$HERE/masked_lm.sh"

model=(
    --arch roberta_none_large --position-encoding "$ENCODING"
    --encoder-layers 24 --encoder-embed-dim 1024 --encoder-ffn-embed-dim 4096
    --encoder-attention-heads 16
)
optimizer=(--optimizer adam --lr 1e-4 --max-update 500000)
# The paper does not give these; they are RoBERTa's (arXiv:1907.11692, table 9).
optimizer+=(
    --dropout 0.1 --attention-dropout 0.1 --activation-fn gelu
    --adam-betas '(0.9, 0.98)' --adam-eps 1e-6 --weight-decay 0.01 --clip-norm 0.0
    --lr-scheduler polynomial_decay --warmup-updates 30000 --total-num-update 500000 --seed 1
)
train "${model[@]}" "${batches[@]}" "${optimizer[@]}" "${files[@]}"
