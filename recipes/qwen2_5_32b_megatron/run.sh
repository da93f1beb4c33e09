#!/usr/bin/env bash
# Qwen2.5-32B on DeepMath-103K: four nodes with 8 GPUs of 80 GB, Megatron TP 8 x PP 2 x DP 2.
#   bash recipes/qwen2_5_32b_megatron/run.sh                  with OAR
#   bash recipes/qwen2_5_32b_megatron/run.sh --variant grpo   its baseline
# Everything after that goes to `oar launch` (see oar launch --help): --on slurm, --dry-run, overrides such as data.seed=1.
set -euo pipefail
exec oar launch "$(dirname "${BASH_SOURCE[0]}")" "$@"
