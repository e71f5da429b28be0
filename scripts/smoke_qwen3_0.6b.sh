#!/usr/bin/env bash
# Trains configs/smoke_qwen3_0.6b.json; arguments go to main.py, e.g. scripts/smoke_qwen3_0.6b.sh --set train.steps=3
set -euo pipefail
source "$(dirname "$0")/_launch.sh"
install requirements.txt
launch configs/smoke_qwen3_0.6b.json "$@"
