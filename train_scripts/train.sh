#!/bin/sh
# Trains a configuration of configs/ as fairseq-hydra-train does; further words change its settings.
#   train_scripts/train.sh laptop model.position_encoding=m4m
configs=$(dirname "$0")/configs
name=${1:-}
names=$(basename -s .yaml "$configs"/*.yaml | grep -vx -e plugin -e masked_lm)   # parts of others
echo "$names" | grep -qxFe "$name" || {
    begin=$(printf %.3s "${name:--}")
    similar=$(for x in $names; do case $x in "$begin"*) echo "$x" ;; esac; done | paste -sd, | sed 's/,/ or /g')
    echo "train.sh: error: ${name:+there is no configuration $name: }${similar:+did you mean $similar? }give one of" \
        "$(echo $names), then settings, as in model.position_encoding=m4m" >&2
    exit 2
}
shift
PATH=$PATH:$(dirname "$0")/../.venv/bin
program=$(command -v fairseq-hydra-train) || {
    echo "train.sh: error: fairseq is not installed here: make install, or docs/start.md" >&2
    exit 2
}
python=$(dirname "$program")/python
[ -x "$python" ] || python=$(dirname "$(readlink -f "$program")")/python   # a link into an environment
[ -x "$python" ] || {
    echo "train.sh: error: there is no python beside $program; activate the environment that has fairseq" >&2
    exit 2
}
# The plugin comes first, so that it also explains errors in the settings, in one line, and leaves
# out what hydra and torch remark on fairseq's code at each start.
exec "$python" -c 'import sys
sys.path = [x for x in sys.path if x]   # the installed package runs, not a folder of its name here
import fairseq_cli   # shows the plugin that this is a command
from fairseq_posenc.user_dir import register
register()
from fairseq_cli.hydra_train import cli_main
cli_main()' --config-dir "$configs" --config-name "$name" "$@"
