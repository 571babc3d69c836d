# Sourced by the scripts of masked language models, after share_batch: what they have in common.

# The papers give the task and, M4M's, full sentences and 512 tokens; the rest is RoBERTa's.
batches=(
    --task masked_lm --criterion masked_lm --tokens-per-sample 512 --sample-break-mode complete
    --mask-prob 0.15 --leave-unmasked-prob 0.1 --random-token-prob 0.1
    --batch-size "$PER_GPU" --update-freq "$UPDATE_FREQ"
    --required-batch-size-multiple 1      # or fairseq drops the end of an epoch
    --skip-invalid-size-inputs-valid-test # sentences of more than 512 tokens; the log counts them
)
files=(
    --no-epoch-checkpoints --save-interval-updates "${SAVE_EVERY:-5000}" --keep-interval-updates 1
    --log-format simple --log-interval 100
)
