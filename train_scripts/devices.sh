# Sourced by common.sh: GPUs, nodes, and the global batch that they make together.

# count_gpus: how many GPUs torch sees (CUDA_VISIBLE_DEVICES chooses them).
count_gpus() {
    local fairseq_train
    fairseq_train=$(program fairseq-train) || exit
    "$(dirname "$fairseq_train")/python" -c 'import torch; print(torch.cuda.device_count())'
}

# choose_devices: GPUS of each machine, WORLD of all, and MEETING, what tells torchrun of the others.
choose_devices() {
    if $CPU; then
        [ -z "$GPUS" ] && [ $PRECISION = --fp16 ] || fail "--cpu goes without --gpus and --bf16"
        GPUS=1 PRECISION=--cpu
    fi
    [ -n "$GPUS" ] || GPUS=$(count_gpus) || exit
    if [ "$GPUS" -eq 0 ] && $DRY_RUN; then
        say "no GPU is visible here: this is the command for one (--gpus N, or --cpu, for another)"
        GPUS=1
    fi
    [ "$GPUS" -gt 0 ] || fail "no GPU is visible; --cpu trains on the processor, which takes long"
    NODES=${NODES:-${SLURM_STEP_NUM_NODES:-1}}
    WORLD=$((NODES * GPUS))
    MEETING=(--standalone)
    [ "$NODES" -gt 1 ] || return 0
    ! $CPU || fail "--cpu goes without --nodes"
    [ -n "$HEAD" ] || find_head
    MEETING=(--nnodes="$NODES" --rdzv-backend=c10d --rdzv-endpoint="$HEAD"
        --rdzv-id="${SLURM_JOB_ID:-$SCRIPT}")
}

# find_head: HEAD, the first node of the SLURM step; the job's number chooses the port.
find_head() {
    [ -n "${SLURM_STEP_NODELIST-}" ] || fail "--nodes $NODES needs --head HOST:PORT outside SLURM"
    [ "${SLURM_STEP_NUM_TASKS-}" = "$NODES" ] ||
        fail "start it once on each node: srun --ntasks-per-node=1 (see slurm.sh)"
    local hosts
    hosts=$(scontrol show hostnames "$SLURM_STEP_NODELIST") || exit
    HEAD=${hosts%%$'\n'*}:$((20000 + SLURM_JOB_ID % 10000))
}

# share_batch TOTAL UNIT: sets UPDATE_FREQ, after how many steps the parameters are updated. If
# --per-gpu was not given, a GPU takes fewer sequences where PER_GPU does not divide the batch.
share_batch() {
    local device=GPU
    ! $CPU || device=processor
    if [ -z "$GIVEN_PER_GPU" ] && [ "$2" = sequences ]; then
        while [ "$PER_GPU" -gt 1 ] && [ $(($1 % (WORLD * PER_GPU))) -ne 0 ]; do
            PER_GPU=$((PER_GPU - 1))
        done
    fi
    local step=$((WORLD * PER_GPU))
    [ $(($1 % step)) -eq 0 ] || fail "a batch of $1 $2 cannot be made of steps of $step" \
        "($WORLD x $PER_GPU): choose --gpus or --per-gpu so that it can"
    UPDATE_FREQ=$(($1 / step))
    say "global batch: $1 $2 = $WORLD $device(s) x $PER_GPU x $UPDATE_FREQ steps (--update-freq)"
    if overridden --batch-size || overridden --max-tokens || overridden --update-freq; then
        say "the options after the two dashes change the batch"
    fi
}
