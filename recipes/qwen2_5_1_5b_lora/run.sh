#!/usr/bin/env bash
# Qwen2.5-1.5B-Instruct with LoRA on GSM8K: one node with 1 GPU of 24 GB or more, FSDP2.
#   bash recipes/qwen2_5_1_5b_lora/run.sh                  with OAR
#   bash recipes/qwen2_5_1_5b_lora/run.sh --variant grpo   its baseline
# Everything after that goes to `oar launch` (see oar launch --help): --dry-run, overrides such as data.seed=1.
set -euo pipefail
exec oar launch "$(dirname "${BASH_SOURCE[0]}")" "$@"
