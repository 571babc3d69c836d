#!/usr/bin/env bash
# Trains the translation models of the report on sinusoidal, learned and rotary positions (IWSLT
# 2017, French to English) with a position encoding of your choice, three times, with other seeds.
#
#   train_scripts/translation_iwslt17.sh ENCODING DATA [OPTION...] [-- OPTION OF FAIRSEQ-TRAIN...]
#
#   train_scripts/translation_iwslt17.sh rope data-bin/iwslt17.fr-en
#   train_scripts/translation_iwslt17.sh learned+m4m data-bin/iwslt17.fr-en --gpus 2
#   SEEDS=1 train_scripts/translation_iwslt17.sh m4m data-bin/iwslt17.fr-en -- --max-epoch 5
#
# At the end it says which seed is best. A GPU takes 4096 tokens at a time, and the batch is 8192.
#
#   SEEDS='1 2 3'   in the environment: the seeds

set -euo pipefail
. "$(dirname "$0")/common.sh"

PER_GPU=4096
read_arguments "$@"
case " ${OVERRIDES[*]-}" in *' --seed'* | *' --save-dir'*)
    fail "set the seeds by SEEDS='1 2', and the folder by --save-dir before the two dashes" ;;
esac
share_batch 8192 tokens # the report does not give its batch
python=$(dirname "$(program fairseq-train)")/python

model=(
    --arch transformer_none --position-encoding "$ENCODING"
    --encoder-layers 6 --encoder-embed-dim 512 --encoder-ffn-embed-dim 2048
    --encoder-attention-heads 8 --decoder-layers 6 --decoder-embed-dim 512
    --decoder-ffn-embed-dim 2048 --decoder-attention-heads 8 --dropout 0.1
)
task=(
    # Without smoothing this is plain cross-entropy; fairseq's own cannot report the accuracy.
    --task translation --criterion label_smoothed_cross_entropy --label-smoothing 0 --report-accuracy
    --max-tokens "$PER_GPU" --update-freq "$UPDATE_FREQ"
    --required-batch-size-multiple 1 # or fairseq drops the end of an epoch, and of the validation
)
# Linear warm-up over 6 epochs, then exponential decay until epoch 20. fairseq counts updates, so
# they are counted first. The report does not say where the decay ends: a hundredth of the rate.
optimizer=(
    --optimizer adam --lr 3e-4 --max-epoch 20
    --lr-scheduler tri_stage --hold-steps 0 --init-lr-scale 0.01 --final-lr-scale 0.01
)
updates=$("$python" "$REPOSITORY/train_scripts/updates_per_epoch.py" "$DATA" \
    --user-dir "$REPOSITORY/fairseq_posenc" --distributed-world-size "$GPUS" \
    "${model[@]}" "${task[@]}" "${optimizer[@]}" ${OVERRIDES[@]+"${OVERRIDES[@]}"})
say "an epoch has $updates updates: warm-up over $((6 * updates)), decay over $((14 * updates))"
optimizer+=(--warmup-steps $((6 * updates)) --decay-steps $((14 * updates)))
files=(--no-epoch-checkpoints --log-format simple --log-interval 100)

all=$SAVE_DIR
for seed in ${SEEDS:-1 2 3}; do
    SAVE_DIR=$all/seed$seed
    (train "${model[@]}" "${task[@]}" "${optimizer[@]}" "${files[@]}" --seed "$seed")
done
$DRY_RUN || "$python" "$REPOSITORY/train_scripts/best_seed.py" "$all"
