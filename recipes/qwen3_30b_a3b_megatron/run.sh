#!/usr/bin/env bash
# Qwen3-30B-A3B (mixture of experts) on DeepMath-103K: four nodes with 8 GPUs of 80 GB, Megatron TP 4 x EP 8 x DP 8.
#   bash recipes/qwen3_30b_a3b_megatron/run.sh                  with OAR
#   bash recipes/qwen3_30b_a3b_megatron/run.sh --variant grpo   its baseline
# Everything after that goes to `oar launch` (see oar launch --help): --on slurm, --dry-run, overrides such as data.seed=1.
set -euo pipefail
exec oar launch "$(dirname "${BASH_SOURCE[0]}")" "$@"
