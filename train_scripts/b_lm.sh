#!/usr/bin/env bash
# Trains the causal language model of DecBERT's paper (Luo et al. 2022, arXiv:2204.08688, table 1)
# with a position encoding of your choice; the paper has learned positions and none.
#
#   train_scripts/b_lm.sh ENCODING DATA [OPTION...] [-- OPTION OF FAIRSEQ-TRAIN...]
#
#   train_scripts/b_lm.sh learned data-bin/wikitext-103
#   train_scripts/b_lm.sh none data-bin/wikitext-103 --gpus 2 --per-gpu 32
#   train_scripts/b_lm.sh 'rope(base=500000)' data-bin/wikitext-2 --cpu -- --max-update 200
#
# The paper: 2 A100-40GB, 10 hours. Batch: 128 sequences.

set -euo pipefail
. "$(dirname "$0")/common.sh"

PER_GPU=16
read_arguments "$@"
share_batch 128 sequences

model=(
    --arch transformer_lm_none --position-encoding "$ENCODING"
    --decoder-layers 8 --decoder-embed-dim 768 --decoder-ffn-embed-dim 3072
    --decoder-attention-heads 12 --activation-fn gelu --dropout 0.1
    --share-decoder-input-output-embed # or the models would not have the paper's 95 M parameters
)
batches=(
    --task language_modeling --tokens-per-sample 512 --sample-break-mode none
    --batch-size "$PER_GPU" --update-freq "$UPDATE_FREQ"
    --required-batch-size-multiple 1 # or fairseq drops the end of an epoch
)
optimizer=(
    --optimizer adam --adam-betas '(0.9, 0.998)' --adam-eps 1e-6
    --weight-decay 0.001 --clip-norm 0.1
    --lr 5e-5 --lr-scheduler polynomial_decay
    --warmup-updates 10000 --total-num-update 100000 --max-update 100000 --seed 1
)
files=(
    --no-epoch-checkpoints --save-interval-updates 5000 --keep-interval-updates 1
    --log-format simple --log-interval 100
)
train "${model[@]}" "${batches[@]}" "${optimizer[@]}" "${files[@]}"
