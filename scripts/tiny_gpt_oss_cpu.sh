#!/usr/bin/env bash
# Trains configs/tiny_gpt_oss_cpu.json; arguments go to main.py, e.g. scripts/tiny_gpt_oss_cpu.sh --set train.steps=3
set -euo pipefail
source "$(dirname "$0")/_launch.sh"
install requirements.txt
launch configs/tiny_gpt_oss_cpu.json "$@"
