#!/usr/bin/env bash
# Trains configs/tiny_cpu.json; arguments go to main.py, e.g. scripts/tiny_cpu.sh --set train.steps=3
set -euo pipefail
source "$(dirname "$0")/_launch.sh"
install requirements.txt
launch configs/tiny_cpu.json "$@"
