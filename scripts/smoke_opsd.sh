#!/usr/bin/env bash
# Distils by configs/smoke_opsd.json, made for 2 GPUs; arguments go to main.py, e.g.
# NUM_GPUS=2 scripts/smoke_opsd.sh --set train.steps=3
set -euo pipefail
source "$(dirname "$0")/_launch.sh"
install requirements.txt
launch configs/smoke_opsd.json "$@"
