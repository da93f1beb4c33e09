#!/usr/bin/env bash
# Install what the tests need and run them: bash tests/run.sh [pytest arguments]
#
# From a fresh machine with Python 3.11. The environment is made in .venv-cpu beside this checkout (VENV=... names another
# place) and kept for the next time. Everything runs by default; `-m "not slow"` leaves out what starts Ray and vLLM.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=${VENV:-$PWD/.venv-cpu}
bash oar_plugin/hosts/verl/cpu/install.sh "$venv" cpu,plots,dev,megatron,recipes
python="$venv/bin/python"
"$venv/bin/ruff" check .
"$venv/bin/ruff" format --check .
"$venv/bin/mypy"
# Two tests at a time: most of a whole run of verl is one process that waits for the imports of another.
exec "$python" -m pytest -n 2 --dist loadfile --no-loadscope-reorder "$@"
