#!/usr/bin/env bash
# Lint, types and tests on CPU. Further arguments go to pytest, e.g. scripts/test.sh -k scheduler
set -euo pipefail
source "$(dirname "$0")/_venv.sh"
install requirements-dev.txt
ruff check .
ruff format --check .
mypy
export OMP_NUM_THREADS=1
exec python -m pytest -m "not slow" "$@"
