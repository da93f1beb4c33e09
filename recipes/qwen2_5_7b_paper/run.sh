#!/usr/bin/env bash
# Qwen2.5-7B with the published estimator: one node with 8 GPUs of 80 GB, FSDP2.
#   bash recipes/qwen2_5_7b_paper/run.sh                  with OAR
#   bash recipes/qwen2_5_7b_paper/run.sh --variant grpo   its baseline
# Everything after that goes to `oar launch` (see oar launch --help): --on slurm, --dry-run, overrides such as data.seed=1.
set -euo pipefail
exec oar launch "$(dirname "${BASH_SOURCE[0]}")" "$@"
