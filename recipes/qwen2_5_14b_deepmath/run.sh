#!/usr/bin/env bash
# Qwen2.5-14B on DeepMath-103K: two nodes with 8 GPUs of 80 GB, FSDP2 with Ulysses over two.
#   bash recipes/qwen2_5_14b_deepmath/run.sh                  with OAR
#   bash recipes/qwen2_5_14b_deepmath/run.sh --variant grpo   its baseline
# Everything after that goes to `oar launch` (see oar launch --help): --on slurm, --dry-run, overrides such as data.seed=1.
set -euo pipefail
exec oar launch "$(dirname "${BASH_SOURCE[0]}")" "$@"
