#!/usr/bin/env bash
# Yi-1.5-34B on DeepMath-103K: eight nodes with 8 GPUs of 80 GB, Megatron TP 8 x CP 2 x PP 2 x DP 2.
#   bash recipes/yi_1_5_34b_megatron/run.sh                  with OAR
#   bash recipes/yi_1_5_34b_megatron/run.sh --variant grpo   its baseline
# Everything after that goes to `oar launch` (see oar launch --help): --on slurm, --dry-run, overrides such as data.seed=1.
set -euo pipefail
exec oar launch "$(dirname "${BASH_SOURCE[0]}")" "$@"
