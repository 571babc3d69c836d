# Shared by the training scripts, which source it: arguments, GPUs, the global batch, the start.
# Works with bash 3.2 and later, which macOS has.
#
# A script sets PER_GPU (what one GPU takes at a time) and calls
#   read_arguments "$@"             ENCODING, DATA and the options below
#   share_batch 128 sequences       UPDATE_FREQ, so that all GPUs together make the global batch
#   train OPTION...                 fairseq-train with these options; goes on from the last checkpoint

REPOSITORY=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
SCRIPT=$(basename "$0" .sh)

say() { printf '%s: %s\n' "$SCRIPT" "$*" >&2; }

fail() {
    say "error: $*"
    exit 2
}

# usage: the comment at the head of the script.
usage() { sed -n '2,/^$/s/^# \{0,1\}//p' "$0"; }

# program NAME: the path of a program, from the PATH or from what `make install` set up.
program() {
    local installed=$REPOSITORY/.venv/bin/$1
    command -v "$1" && return
    [ -x "$installed" ] || fail "$1 is not installed: run 'make install' in $REPOSITORY"
    echo "$installed"
}

# count_gpus: how many GPUs torch sees (CUDA_VISIBLE_DEVICES chooses them).
count_gpus() {
    local fairseq_train
    fairseq_train=$(program fairseq-train) || exit
    "$(dirname "$fairseq_train")/python" -c 'import torch; print(torch.cuda.device_count())'
}

whole_number() {
    case $2 in
    '' | 0* | *[!0-9]*) fail "$1 must be a whole number of at least 1, not '$2'" ;;
    esac
}

read_arguments() {
    GPUS='' SAVE_DIR='' DRY_RUN=false CPU=false PRECISION=--fp16 OVERRIDES=()
    case ${1:-} in
    -h | --help) usage && exit ;;
    -*) fail "expected ENCODING DATA before the options; $0 --help tells more" ;;
    esac
    [ $# -ge 2 ] || fail "expected ENCODING DATA; $0 --help tells more"
    ENCODING=$1 DATA=$2
    shift 2
    while [ $# -gt 0 ]; do
        case $1 in --gpus | --per-gpu | --save-dir) [ $# -ge 2 ] || fail "$1 needs a value" ;; esac
        case $1 in
        --dry-run) DRY_RUN=true ;;
        --cpu) CPU=true ;;
        --bf16) PRECISION=--bf16 ;;
        --gpus) whole_number "$1" "$2" && GPUS=$2 && shift ;;
        --per-gpu) whole_number "$1" "$2" && PER_GPU=$2 && shift ;;
        --save-dir) SAVE_DIR=$2 && shift ;;
        --) shift && OVERRIDES=("$@") && break ;;
        *) fail "unknown option '$1' (options for fairseq-train go after --); $0 --help tells more" ;;
        esac
        shift
    done
    ls "$DATA"/dict*.txt >/dev/null 2>&1 || fail "$DATA is no data-bin folder: it has no dict.txt"
    choose_gpus
    # The spec as a folder's name: rope(scaling=ntk:4) becomes rope-scaling=ntk-4.
    local name
    name=$(printf %s "$ENCODING" | tr -d ' )' | tr '(:,' '---')
    SAVE_DIR=${SAVE_DIR:-checkpoints/$SCRIPT/$(basename "$DATA")/$name}
}

choose_gpus() {
    if $CPU; then
        [ -z "$GPUS" ] && [ $PRECISION = --fp16 ] || fail "--cpu goes without --gpus and --bf16"
        GPUS=1 PRECISION=--cpu
    fi
    [ -n "$GPUS" ] || GPUS=$(count_gpus) || exit
    [ "$GPUS" -gt 0 ] || fail "no GPU is visible; --cpu trains on the processor, which takes long"
}

# share_batch TOTAL UNIT: sets UPDATE_FREQ, after how many steps the parameters are updated.
share_batch() {
    local step=$((GPUS * PER_GPU)) device=GPU
    ! $CPU || device=processor
    [ $(($1 % step)) -eq 0 ] || fail "a batch of $1 $2 cannot be made of steps of $step" \
        "($GPUS x $PER_GPU): choose --per-gpu so that it can"
    UPDATE_FREQ=$(($1 / step))
    say "global batch: $1 $2 = $GPUS $device(s) x $PER_GPU x $UPDATE_FREQ steps (--update-freq)"
}

# train OPTION...: starts fairseq-train, or goes on from the last checkpoint in SAVE_DIR.
train() {
    local fairseq_train torchrun command
    fairseq_train=$(program fairseq-train) || exit
    command=("$fairseq_train")
    if [ "$GPUS" -gt 1 ]; then
        torchrun=$(program torchrun) || exit
        command=("$torchrun" --standalone --nproc_per_node="$GPUS" "$fairseq_train")
    fi
    command+=("$DATA" --user-dir "$REPOSITORY/fairseq_posenc" "$@" "$PRECISION")
    command+=(--distributed-world-size "$GPUS" --save-dir "$SAVE_DIR")
    command+=(${OVERRIDES[@]+"${OVERRIDES[@]}"})
    if [ -e "$SAVE_DIR/checkpoint_last.pt" ]; then
        say "going on from $SAVE_DIR/checkpoint_last.pt"
    else
        say "starting from new weights; checkpoints go to $SAVE_DIR"
    fi
    if $DRY_RUN; then
        printf '%q ' "${command[@]}"
        echo
        return
    fi
    exec "${command[@]}"
}
