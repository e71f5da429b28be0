#!/usr/bin/env bash
# Lint, types and tests on CPU. Further arguments go to pytest, e.g. scripts/test.sh -k scheduler; -n 0 for one process
set -euo pipefail
source "$(dirname "$0")/_venv.sh"
install requirements/dev.txt
ruff check .
ruff format --check .
mypy
export OMP_NUM_THREADS=1
exec python -m pytest -m "not slow" -n 2 --dist loadfile "$@"  # a file's tests share what they set up
