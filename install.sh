#!/bin/sh
# Puts everything that the project needs into .venv, at the versions of constraints.txt.
#
# Safe to call at any time: it does nothing when nothing changed, and it repairs what an
# interrupted call left behind. PYTHON=... chooses the interpreter. HASHES=1 takes no file from
# the package index but those whose hashes are in hashes.txt, in a new environment.
set -eu
cd -P "$(dirname "$0")"

venv=$PWD/.venv
log=$venv/install.log
stamp=$venv/installed # there when every step is done; holds what the steps depended on
busy=$venv/busy       # there while a step runs, and after a step that was interrupted

# The directory counts too: a virtual environment does not survive being moved.
wanted="$PWD $(cat constraints.txt pyproject.toml setup.py install.sh fairseq_posenc/version.py | cksum)"
verified="$wanted, each file with its hash"

# Personal pip settings that do not go with a virtual environment.
export PIP_USER=0
# With it set, fairseq would also compile CUDA kernels, which need the very CUDA of torch.
unset CUDA_HOME

say() { printf 'install: %s\n' "$*"; }

die() {
    say "$*" >&2
    exit 1
}

is_running() {
    # A killed process that nobody has waited for yet still answers to `kill -0`.
    kill -0 "$1" 2>/dev/null && case $(ps -o stat= -p "$1" 2>/dev/null) in Z*) false ;; esac
}

version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true; }

venv_is_usable() {
    # pip's script is the last thing a new environment gets, and it names the directory.
    [ ! -f "$busy" ] && [ -x "$venv/bin/python" ] && grep -qsF "$venv/bin/python" "$venv/bin/pip" &&
        { [ -z "${PYTHON:-}" ] || [ "$(version_of "$PYTHON")" = "$(version_of "$venv/bin/python")" ]; }
}

find_python() {
    if [ -n "${PYTHON:-}" ]; then set -- "$PYTHON"; else set -- python3.12 python3.11 python3; fi
    for python; do
        case $(version_of "$python") in 3.11 | 3.12) return ;; esac
    done
    die "no Python 3.11 or 3.12 here ($*); install one or name it: make install PYTHON=/path/to/python3.12"
}

# fairseq, and one of the packages it needs, are published as source only.
check_build_tools() {
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        die "$python cannot make virtual environments; on Debian and Ubuntu: apt install python$(version_of "$python")-venv"
    echo '#include <vector>' | "${CXX:-c++}" -x c++ -fsyntax-only - 2>/dev/null ||
        die "no working C++ compiler (${CXX:-c++}); on Debian and Ubuntu: apt install g++, on macOS: xcode-select --install"
    [ -f "$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" ] ||
        die "$python has no C headers; on Debian and Ubuntu: apt install python$(version_of "$python")-dev"
}

# step TEXT COMMAND...: one line of progress; what the command prints goes to the log.
step() {
    printf 'install: %s ... ' "$1"
    shift
    began=$(date +%s)
    echo $$ >"$busy"
    printf '\n$ %s\n' "$*" >>"$log"
    if "$@" >>"$log" 2>&1; then outcome=done; else outcome=failed; fi
    rm "$busy"
    printf '%s (%d s)\n' $outcome $(($(date +%s) - began))
    [ $outcome = failed ] || return 0
    if tail -n 25 "$log" | grep -qE 'NewConnection|NameResolution|ConnectTimeout|ProxyError|Max retries'; then
        die "the package index cannot be reached; check the network (and pip's proxy and index settings), then try again"
    fi
    tail -n 15 "$log" >&2
    die "that step failed; the whole log is in $log"
}

pip_install() {
    "$venv/bin/python" -m pip install --no-input --retries 2 --constraint constraints.txt "$@"
}

# hashed NAMES [OTHERS]: install the packages of hashes.txt whose names begin with NAMES and not
# with OTHERS (both are patterns).
hashed() {
    awk -v names="^($1)" -v others="^(${2:-[^a-z]})" \
        '/^[a-z]/ { on = $1 ~ names && $1 !~ others } on && !/^#/' hashes.txt >"$venv/hashed.txt"
    "$venv/bin/python" -m pip install --no-input --retries 2 --require-hashes --no-deps \
        --no-build-isolation --requirement "$venv/hashed.txt"
}

# compile COMMAND...: builds extensions side by side, and without symbols for debuggers, which take half
# of the compiler's time. torch would build with ninja where there is one, and has one file for the
# rules of all extensions: a ninja that fails keeps it away.
compile() (
    mkdir -p "$venv/compile"
    printf '#!/bin/sh\nexit 1\n' >"$venv/compile/ninja"
    chmod +x "$venv/compile/ninja"
    printf '[build_ext]\nparallel = %s\n' "$(getconf _NPROCESSORS_ONLN)" >"$venv/compile/setup.cfg"
    flags=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_config_var("CFLAGS"), "-g0")')
    export PATH="$venv/compile:$PATH" DIST_EXTRA_CONFIG="$venv/compile/setup.cfg" CFLAGS="$flags" CXXFLAGS="$flags"
    "$@"
)

# fairseq looks for `--user-dir fairseq_posenc` beside itself, where pip's editable
# installation puts nothing.
link_user_dir() {
    link=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/fairseq_posenc
    rm -rf "$link"
    ln -s "$PWD/fairseq_posenc" "$link"
}

# fairseq requires torchaudio, and needs it for speech alone. Its release 2.11.0 cannot be loaded
# by torch 2.13, and transformers imports it wherever it is installed.
remove_broken_torchaudio() {
    "$venv/bin/python" -c 'import torchaudio' ||
        "$venv/bin/python" -m pip uninstall --yes torchaudio
}

if venv_is_usable; then
    case $(cat "$stamp" 2>/dev/null) in
        "$verified") exit 0 ;;
        "$wanted") [ -n "${HASHES:-}" ] || exit 0 ;;
    esac
fi
if [ -f "$busy" ] && is_running "$(cat "$busy")"; then
    die "process $(cat "$busy") is installing already; wait for it (or, if it does something else, delete $venv)"
fi
trap 'echo; exit 130' HUP INT TERM # an interrupted step leaves its $busy

if venv_is_usable && [ -z "${HASHES:-}" ]; then
    python=$venv/bin/python
    check_build_tools
    rm -f "$stamp"
else
    find_python
    check_build_tools
    [ ! -e "$venv" ] || say "the environment in .venv is incomplete, unverified, was moved, or has another Python; replacing it"
    rm -f "$stamp" "$venv/bin/pip" # first, so that an interrupted removal is seen as one
    rm -rf "$venv"
    mkdir "$venv"
    step "environment in .venv, with Python $(version_of "$python")" "$python" -m venv "$venv"
fi
if [ "$(uname)" = Linux ] && [ -z "${PIP_EXTRA_INDEX_URL:-}${PIP_INDEX_URL:-}" ] && [ ! -d "$venv"/lib/python*/site-packages/torch ]; then
    say "PyPI's torch comes with CUDA, 5.9 GB of disk; for processors alone, 0.8 GB: stop this (Ctrl-C), then"
    say "PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make install"
fi
if [ -n "${HASHES:-}" ]; then
    others=fairseq
    [ "$(uname)" = Linux ] || others='fairseq|nvidia|cuda|triton'
    step "pip and build tools, verified" hashed 'pip==|setuptools==|wheel==|cython==|numpy=='
    step "torch (some GB on Linux) and all else, verified" hashed '' "$others"
    step "fairseq (compiled once, about a minute), verified" compile hashed fairseq
    step "fairseq_posenc" "$venv/bin/python" -m pip install --no-deps --no-build-isolation --editable .
    wanted=$verified
else
    step "pip and build tools" pip_install pip setuptools wheel cython
    step "torch (the largest download, some GB on Linux)" pip_install torch numpy
    step "fairseq (compiled once, about a minute)" compile pip_install --no-build-isolation fairseq-fixed
    step "fairseq_posenc and its tools (many small packages, a minute or more)" pip_install --no-build-isolation --editable '.[dev]'
fi
step "torchaudio left out, if this torch cannot load it" remove_broken_torchaudio
step "fairseq_posenc as a --user-dir" link_user_dir
printf '%s' "$wanted" >"$stamp"
say "ready"
