#!/usr/bin/env bash
# Trains configs/gpt_oss_20b_gsm8k_8gpu.json; arguments go to main.py, e.g. scripts/gpt_oss_20b_gsm8k_8gpu.sh --set train.steps=20
set -euo pipefail
source "$(dirname "$0")/_launch.sh"
install requirements.txt
launch configs/gpt_oss_20b_gsm8k_8gpu.json "$@"
