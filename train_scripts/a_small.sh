#!/usr/bin/env bash
# Pre-trains RoBERTa-base with a position encoding of your choice, as M4M's paper compares them
# (Huang et al. 2021, arXiv:2109.12788, section 5.1, table 2).
#
#   train_scripts/a_small.sh ENCODING DATA [OPTION...] [-- OPTION OF FAIRSEQ-TRAIN...]
#
#   train_scripts/a_small.sh m4m data-bin/books-wiki
#   train_scripts/a_small.sh learned+m4m data-bin/books-wiki --gpus 8
#
# The paper: BooksCorpus and English Wikipedia, 8 A100-40GB, 30 hours. Batch: 96 sequences.
# (a_none.sh is this script under another name.)

set -euo pipefail
. "$(dirname "$0")/common.sh"

PER_GPU=16
read_arguments "$@"
share_batch 96 sequences
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
