#!/usr/bin/env bash
# Trains the shipped tiny Qwen3 to use the Python tool, on CPU, from nothing: about a minute on two cores.
# Further arguments go to main.py, e.g. scripts/demo.sh --set train.seed=1
# Last line: {"reward_first": .., "reward_last": .., "train_seconds": .., "seed": ..}, fractions correct of the sampled
# trajectories: of the first step, and of the last five together.
set -euo pipefail
source "$(dirname "$0")/_venv.sh"
install requirements.txt
run_dir=$(mktemp -d "${TMPDIR:-/tmp}/demo.XXXXXX")
python main.py --config configs/tiny_cpu.json --run-dir "$run_dir" "$@"
python - "$run_dir" <<'PY'
import json, pathlib, sys
run = pathlib.Path(sys.argv[1])
rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
last = rows[-5:]
print(json.dumps({
    "reward_first": round(rows[0]["correct"], 4),
    "reward_last": round(sum(row["correct"] for row in last) / len(last), 4),
    "train_seconds": round(sum(row["seconds"] for row in rows), 1),
    "seed": json.loads((run / "config.json").read_text())["train"]["seed"],
}))
PY
