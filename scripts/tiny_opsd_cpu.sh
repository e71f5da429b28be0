#!/usr/bin/env bash
# Distils a tiny student that cannot use the tool on its own rollouts, on CPU; arguments go to main.py.
# What is absent is made first: the teacher (configs/tiny_cpu.json, trained by GRPO: half a minute on two cores) and the
# student (scripts/build_tiny_model.py, half a minute). The run evaluates greedily before, while and after it trains.
set -euo pipefail
source "$(dirname "$0")/_launch.sh"
install requirements.txt
if [ -z "${DRY_RUN:-}" ]; then
    refuse_bad_settings configs/tiny_opsd_cpu.json "$@"
    if [ ! -e runs/tiny_teacher/checkpoints/step_50/state.json ]; then
        rm -rf runs/tiny_teacher # what a killed run left
        python main.py --config configs/tiny_cpu.json --run-dir runs/tiny_teacher
    fi
    [ -e runs/tiny_student/model.safetensors ] || python -m scripts.build_tiny_model tiny_student --out runs/tiny_student
fi
launch configs/tiny_opsd_cpu.json "$@"
