# Sourced by common.sh: what the weights start from, and the start of fairseq-train.

# overridden OPTION: whether it is among what goes to fairseq-train.
overridden() {
    case " ${OVERRIDES[*]-} " in *" $1 "* | *" $1="*) return 0 ;; esac
    return 1
}

# choose_start: says what the weights start from. They are never random by mistake, and a second
# call never starts again.
choose_start() {
    local last=$SAVE_DIR/checkpoint_last.pt
    ! overridden --save-dir || fail "give --save-dir before the two dashes"
    START=()
    [ -z "$INIT_FILE" ] || START=(--finetune-from-model "$INIT_FILE")
    if [ -e "$last" ]; then
        ! overridden --restore-file || fail "$last would be lost: leave --restore-file out to go" \
            "on from it, or choose another --save-dir"
        say "going on from $last"
    elif [ -n "$INIT_FILE" ]; then
        [ -f "$INIT_FILE" ] || fail "--init $INIT_FILE does not exist"
        say "starting from the weights of $INIT_FILE; checkpoints go to $SAVE_DIR"
    elif overridden --restore-file || overridden --finetune-from-model; then
        say "starting as its options for fairseq-train say; checkpoints go to $SAVE_DIR"
    elif [ "${INIT-}" = required ]; then
        fail "this model starts from a released RoBERTa: --init CHECKPOINT, which" \
            "'fairseq-posenc init' makes"
    else
        say "starting from new weights; checkpoints go to $SAVE_DIR"
    fi
}

# run: what makes a run another one than others, a line each; not where it runs, what it writes, or
# how long it goes on.
run() {
    local word line='' skip=false
    printf '%s\n' "$SCRIPT" "encoding $ENCODING" "data $DATA_NAME" ${MODEL:+"model $MODEL"}
    for word in ${OVERRIDES[@]+"${OVERRIDES[@]}"}; do
        case $word in
        --*)
            $skip || [ -z "$line" ] || printf '%s\n' "$line"
            line=$word skip=false
            case $word in
            --log-* | --save-interval* | --validate-interval* | --keep-* | --num-workers* | \
                --max-update* | --max-epoch* | --stop-time-hours* | --position-backend* | \
                --restore-file* | --finetune-from-model* | --reset-* | --no-progress-bar | \
                --no-epoch-checkpoints | --disable-validation) skip=true ;;
            esac
            ;;
        *) line="$line $word" ;;
        esac
    done
    $skip || [ -z "$line" ] || printf '%s\n' "$line"
}

# refuse_another_run: a folder knows its run, and one with other positions does not go on from it.
refuse_another_run() {
    local kept=$SAVE_DIR/run.txt difference
    [ -e "$SAVE_DIR/checkpoint_last.pt" ] && [ -e "$kept" ] || return 0
    difference=$(diff <(sort "$kept") <(run | sort) |
        sed -n 's/^< \(.*\)/it was started with "\1"/p; s/^> \(.*\)/this is with "\1"/p') || true
    [ -z "$difference" ] || fail "$SAVE_DIR holds another run:" \
        "$(printf '%s' "$difference" | tr '\n' ';' | sed 's/;/; /g'); choose another --save-dir"
}

# whole FILE: whether a checkpoint was written to its end, where an archive has its directory.
whole() { [ "$(tail -c 22 "$1" | head -c 4 | tr -d '\0')" = "$(printf 'PK\005\006')" ]; }

# mend_last: fairseq copies a new checkpoint onto checkpoint_last.pt in place. A run that was killed in
# the middle of that has the same checkpoint, whole, under another name.
mend_last() {
    local last=$SAVE_DIR/checkpoint_last.pt other
    whole "$last" && return
    for other in $(cd "$SAVE_DIR" && ls -t checkpoint_[0-9]*.pt checkpoint_best.pt 2>/dev/null); do
        whole "$SAVE_DIR/$other" || continue
        say "checkpoint_last.pt is torn, from a run that was killed: $other takes its place"
        cp "$SAVE_DIR/$other" "$last.$HOSTNAME-$$" && mv "$last.$HOSTNAME-$$" "$last" && return
    done
    fail "$last is torn, from a run that was killed, and there is no other checkpoint beside it;" \
        "remove it to start again"
}

# finished COMMAND...: whether its last update was made already; fairseq would make one more each time.
finished() {
    local last='' word before='' log=$SAVE_DIR/train.log updates
    for word in "$@"; do
        case $before in --max-update) last=$word ;; esac
        case $word in --max-update=*) last=${word#*=} ;; esac
        before=$word
    done
    [ -n "$last" ] && [ -e "$SAVE_DIR/checkpoint_last.pt" ] && [ -e "$log" ] || return 1
    updates=$(sed -n 's/.*Saved checkpoint .* @ \([0-9]*\) updates.*/\1/p' "$log" | tail -n 1)
    [ "${updates:-0}" -ge "$last" ] || return 1
    say "finished: $SAVE_DIR/checkpoint_last.pt has $updates updates, of --max-update $last"
}

# train OPTION...: starts fairseq-train, or goes on from the last checkpoint in SAVE_DIR.
train() {
    local fairseq_train torchrun command
    fairseq_train=$(program fairseq-train) || exit
    command=("$fairseq_train")
    if [ "$WORLD" -gt 1 ]; then
        torchrun=$(program torchrun) || exit
        command=("$torchrun" "${MEETING[@]}" --nproc_per_node="$GPUS" "$fairseq_train")
    fi
    choose_start
    refuse_another_run
    command+=("$DATA" --user-dir "$REPOSITORY/fairseq_posenc" "$@" "$PRECISION")
    command+=(--distributed-world-size "$WORLD" --save-dir "$SAVE_DIR")
    command+=(${START[@]+"${START[@]}"} ${OVERRIDES[@]+"${OVERRIDES[@]}"})
    if $DRY_RUN; then
        printf '%q ' "${command[@]}"
        echo
        return
    fi
    ! finished "${command[@]}" || return 0
    mkdir -p "$SAVE_DIR"
    run >"$SAVE_DIR/run.txt"
    [ ! -e "$SAVE_DIR/checkpoint_last.pt" ] || mend_last
    # fairseq's own --log-file repeats every line once more in each epoch.
    exec "${command[@]}" > >(exec tee -i -a "$SAVE_DIR/train.log") 2>&1
}
