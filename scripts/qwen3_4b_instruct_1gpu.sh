#!/usr/bin/env bash
# Trains configs/qwen3_4b_instruct_1gpu.json; arguments go to main.py, e.g. scripts/qwen3_4b_instruct_1gpu.sh --set train.steps=20
set -euo pipefail
source "$(dirname "$0")/_launch.sh"
install requirements.txt
launch configs/qwen3_4b_instruct_1gpu.json "$@"
