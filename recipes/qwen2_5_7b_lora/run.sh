#!/usr/bin/env bash
# Qwen2.5-7B with LoRA on GSM8K and MATH: one node with 8 GPUs of 40 GB or more, FSDP2.
#   bash recipes/qwen2_5_7b_lora/run.sh                  with OAR
#   bash recipes/qwen2_5_7b_lora/run.sh --variant grpo   its baseline
# Everything after that goes to `oar launch` (see oar launch --help): --on slurm, --dry-run, overrides such as data.seed=1.
set -euo pipefail
exec oar launch "$(dirname "${BASH_SOURCE[0]}")" "$@"
