# Shared by the training scripts, which source it: the arguments. GPUs, nodes and the global batch are
# in devices.sh, the start in start.sh. Works with bash 3.2 and later, which macOS has.
#
# A script sets PER_GPU, what one GPU takes at a time, and where it has them
#   INIT=required | optional     it starts from a checkpoint, --init
#   MODEL=bert                   it has DecBERT's models, --model
# and calls
#   read_arguments "$@"          ENCODING, DATA and the options below
#   share_batch 128 sequences    UPDATE_FREQ, so that all GPUs together make the global batch
#   train OPTION...              fairseq-train with these options; goes on from the last checkpoint
#
# options: what --help shows of all scripts
#   --gpus N        GPUs of this machine to use (default: all that are visible); several run under
#                   torchrun
#   --nodes N       machines (default: those of the SLURM step); the same command runs on each
#   --head HOST:PORT  the machine where they meet (default: the first of the SLURM step)
#   --per-gpu N     what a GPU takes at a time; the global batch stays what it is
#   --save-dir DIR  where checkpoints and train.log go (default: checkpoints/SCRIPT/DATA/ENCODING,
#                   without brackets and colons)
#   --bf16          bfloat16 in place of float16
#   --cpu           train on the processor, in float32
#   --dry-run       print the command and stop
#
# ENCODING is a spec (fairseq-posenc list), DATA a data-bin folder, or several joined by colons, or a
# folder with shard0, shard1 and so on. What follows -- goes to fairseq-train and overrides the rest.
# The same command again goes on from the last checkpoint.
# end of options

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
REPOSITORY=$(dirname "$HERE")
SCRIPT=$(basename "$0" .sh)
. "$HERE/devices.sh"
. "$HERE/start.sh"

say() { printf '%s: %s\n' "$SCRIPT" "$*" >&2; }

fail() {
    say "error: $*"
    exit 2
}

# usage: the comment at the head of the script, and that on the options of all scripts.
usage() {
    sed -n '2,/^$/s/^# \{0,1\}//p' "$0"
    echo
    sed -n '/^# options:/,/^# end of/{/^# options:/d;/^# end of/d;s/^# \{0,1\}//p;}' \
        "$HERE/common.sh"
}

# program NAME: the path of a program, from the PATH or from what `make install` set up.
program() {
    local installed=$REPOSITORY/.venv/bin/$1
    command -v "$1" && return
    [ -x "$installed" ] || fail "$1 is not installed: run 'make install' in $REPOSITORY"
    echo "$installed"
}

whole_number() {
    case $2 in
    '' | 0* | *[!0-9]*) fail "$1 must be a whole number of at least 1, not '$2'" ;;
    esac
}

read_arguments() {
    GPUS='' NODES='' HEAD='' GIVEN_PER_GPU='' SAVE_DIR='' INIT_FILE='' PRECISION=--fp16
    DRY_RUN=false CPU=false OVERRIDES=()
    case ${1:-} in
    -h | --help) usage && exit ;;
    -*) fail "expected ENCODING DATA before the options; $0 --help tells more" ;;
    esac
    [ $# -ge 2 ] || fail "expected ENCODING DATA; $0 --help tells more"
    ENCODING=$1 DATA=$2
    shift 2
    while [ $# -gt 0 ]; do
        case $1 in
        --dry-run) DRY_RUN=true && shift && continue ;;
        --cpu) CPU=true && shift && continue ;;
        --bf16) PRECISION=--bf16 && shift && continue ;;
        --) shift && OVERRIDES=("$@") && break ;;
        --gpus | --nodes | --head | --per-gpu | --save-dir) ;;
        --init) [ -n "${INIT-}" ] || unknown "$1" ;;
        --model) [ -n "${MODEL-}" ] || unknown "$1" ;;
        *) unknown "$1" ;;
        esac
        [ $# -ge 2 ] || fail "$1 needs a value"
        read_value "$1" "$2"
        shift 2
    done
    find_data
    choose_devices
    name_save_dir
}

unknown() {
    fail "unknown option '$1' (options for fairseq-train go after --); $0 --help tells more"
}

read_value() {
    case $1 in
    --gpus) whole_number "$1" "$2" && GPUS=$2 ;;
    --nodes) whole_number "$1" "$2" && NODES=$2 ;;
    --per-gpu) whole_number "$1" "$2" && PER_GPU=$2 GIVEN_PER_GPU=$2 ;;
    --head) HEAD=$2 ;;
    --save-dir) SAVE_DIR=$2 ;;
    --init) INIT_FILE=$2 ;;
    --model)
        MODEL=$2
        model_options >/dev/null
        ;;
    esac
}

# model_options: the architecture of MODEL, as options of fairseq-train; the papers' two have names,
# the others are told by what their first layers see.
model_options() {
    case $MODEL in
    bert) echo --arch roberta_none ;;
    decbert_same | decbert_diff) echo --arch "$MODEL" ;;
    decbert_first) echo --arch roberta_none --attention-directions lr ;;
    decbert_same_three) echo --arch roberta_none --attention-directions lr,lr,lr ;;
    decbert_diff_three) echo --arch roberta_none --attention-directions lr,rl,lr ;;
    *) fail "--model must be bert, decbert_same or decbert_diff, or for the ablation decbert_first," \
        "decbert_same_three or decbert_diff_three, not '$MODEL'" ;;
    esac
}

# find_data: DATA as fairseq reads it, folders joined by colons; DATA_NAME, a word for it.
find_data() {
    DATA_NAME=$(basename "$DATA")
    local folder shards=("$DATA"/shard*)
    if [ -d "${shards[0]}" ]; then
        DATA=$(printf '%s:' "${shards[@]}")
        DATA=${DATA%:}
    elif [ "${DATA#*:}" != "$DATA" ]; then
        DATA_NAME=$(basename "$(dirname "${DATA%%:*}")")
    fi
    local IFS=: folders
    folders=($DATA)
    for folder in "${folders[@]}"; do
        case $folder in *.partial) fail "$folder is not finished: start its preprocessing again" ;; esac
        [ -d "$folder" ] || fail "there is no folder $folder"
        case $folder in *-of-*) [ "${folder##*-of-}" = "${#folders[@]}" ] ||
            fail "$folder is one of ${folder##*-of-} shards, and ${#folders[@]} are given" ;; esac
        ls "$folder"/dict*.txt >/dev/null 2>&1 ||
            fail "$folder is no data-bin folder: it has no dict.txt"
        [ ! -e "$folder/dict.txt" ] || cmp -s "${DATA%%:*}/dict.txt" "$folder/dict.txt" ||
            fail "$folder/dict.txt is not that of ${DATA%%:*}: its numbers mean other tokens"
    done
}

# name_save_dir: the spec as a folder's name: rope(scaling=ntk:4) becomes rope-scaling=ntk-4.
name_save_dir() {
    local name
    name=$(printf %s "${MODEL:+$MODEL-}$ENCODING" | tr -d ' )' | tr '(:,' '---')
    SAVE_DIR=${SAVE_DIR:-checkpoints/$SCRIPT/$DATA_NAME/$name}
}
