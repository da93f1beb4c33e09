#!/usr/bin/env bash
# Seconds, peak memory and FLOPs of the pieces of a step on one GPU, in six minutes: bash benchmarks/gpu_step.sh [FOLDER] [--tiny]
#
# Downloads nothing and needs no Ray. The first part, the package's passes on HuggingFace models with random weights, needs what
# the package needs: torch, transformers and a few small packages. The second, verl's FSDP engine, runs where verl is installed,
# with this checkout in it: pip install --no-deps -e .
# FOLDER (default: $OUT, or gpu_step) gets pieces.jsonl, with a line for each piece as soon as it is measured, and the page,
# gpu_step.md and .json. Called again with the same folder, it measures what is missing. A piece that fails is told on the page,
# and the exit status is 1. Without a GPU: --tiny is a rehearsal (of the second part: with verl_cpu, and VERL_PLATFORM=cpu).
set -uo pipefail
case ${1:-} in
  '' | --*) folder=${OUT:-gpu_step} ;;
  *) folder=$1 && shift ;;
esac
folder=$(realpath -m "$folder")
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python}
begin=$(date +%s)
status=0
part() { # a name, the second at which no piece of it begins any more, and the one at which it is ended
  timeout -k 5 $((begin + $3 - $(date +%s))) "$python" -m benchmarks.gpu_step "$1" "$folder" --until $((begin + $2)) "${@:4}" ||
    status=1
}
# A process group of one; port 0 is any that is free.
export RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 LOCAL_WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=0
verl=$("$python" -c 'import importlib.util; print(importlib.util.find_spec("verl") or "")')
if [ -n "$verl" ]; then
  part plain 205 220 "$@"
  part engine 335 350 "$@"
else
  part plain 335 350 "$@"
fi
echo "page: $folder/gpu_step.md, figures: $folder/gpu_step.json"
exit $status
