#!/usr/bin/env bash
# Install what the tests need and run them: bash tests/run.sh [pytest arguments]
#
# From a fresh machine with Python 3.11. The environment is made in .venv-cpu beside this checkout (VENV=... names another
# place) and kept for the next time. `-m "not slow"` leaves out what starts Ray and vLLM; `-m nightly` runs what is left out
# by default, whole runs that cover little that others do not.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=${VENV:-$PWD/.venv-cpu}
bash verl_cpu/install.sh "$venv" cpu,benchmarks,dev,megatron,recipes
# The pages are tested in a browser. Where none can be had those tests are skipped.
if ! command -v chromium-headless-shell chromium google-chrome > /dev/null; then
  if [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null; then
    { apt-get update && apt-get install -y --no-install-recommends chromium-headless-shell; } || true
  else
    "$venv/bin/playwright" install chromium-headless-shell || true
  fi
fi
"$venv/bin/ruff" check .
"$venv/bin/ruff" format --check .
"$venv/bin/mypy"
# Known vulnerabilities of what is pinned, where the package index tells of them. pip-audit has an environment of its own: nothing
# that is tested depends on it.
if [ ! -x "$venv/audit/bin/pip-audit" ]; then
  rm -rf "$venv/audit" # of a run that was interrupted
  "$venv/bin/python" -m venv "$venv/audit" && timeout 300 "$venv/audit/bin/pip" install --quiet pip-audit==2.10.1 || true
fi
AUDIT=$venv/audit/bin/pip-audit "$venv/bin/python" -m tests.audit
# Each release of TRL lies beside the environment: wherever a trl is found, verl's patch of models imports from it what is no
# longer there. Both releases are tested at the same time, each by a process of its own.
declare -A tested
for trl in 1.16.0 1.15.0; do
  if [ ! -d "$venv/trl-$trl" ]; then
    rm -rf "$venv/trl-$trl.part" # of a run that was interrupted
    "$venv/bin/pip" install --quiet --no-deps --target "$venv/trl-$trl.part" "trl==$trl"
    mv "$venv/trl-$trl.part" "$venv/trl-$trl"
  fi
  PYTHONPATH=$(realpath "$venv/trl-$trl") "$venv/bin/python" -m pytest -q tests/hosts/trl > "$venv/trl-$trl.log" 2>&1 &
  tested[$trl]=$!
done
status=0
for trl in "${!tested[@]}"; do
  wait "${tested[$trl]}" || status=$?
  cat "$venv/trl-$trl.log"
done
[ "$status" = 0 ]
# Two tests at a time: most of a whole run of verl is one process that waits for the imports of another.
# Of two -m pytest takes the last one.
exec "$venv/bin/python" -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not nightly" "$@"
