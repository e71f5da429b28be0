"""Host time of the rollout engine alone: a scripted workload over a decoder that computes nothing.

    python benchmarks/bench_engine.py [--workload retool_64]

Prints one JSON line: CPU time of a step, scheduling and records included.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.bench_rollout import CONTEXT, rollout
from benchmarks.machine import describe
from benchmarks.scripted import ScriptedRun
from benchmarks.workload import load_workload, scripts_of
from decode.interface import Done, Draws
from rollout.engine import RolloutEngine
from rollout.records import Work


class IdleDecoder:
    """Draws the same token everywhere, at once."""

    pipelined, captures = True, 0

    def submit(self, chunks: Any, temperature: float) -> Done:
        count = sum(chunk.sample for chunk in chunks)
        return Done(Draws([5] * count, [-1.0] * count))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="retool_64")
    options = parser.parse_args()
    rows, samples = load_workload(options.workload, context=CONTEXT)
    chat: Any = SimpleNamespace(stop_ids=frozenset())
    tool: Any = object()
    engine = RolloutEngine(
        IdleDecoder(), chat, tool, decode_rows=64, page_size=16, num_pages=40_000, prefill_tokens=8192,
        forced_tokens=512, step_rows=128,
    )  # fmt: skip
    engine.run_type = type("Run", (ScriptedRun,), {"scripts": scripts_of(rows), "instant": True})
    alone: Any = SimpleNamespace(gather=lambda item: [item], deal=lambda *_: Work())
    started = time.process_time()
    rollout(engine, alone, rows, samples, "engine", limit=600.0)
    seconds = time.process_time() - started
    print(json.dumps({
        "benchmark": "engine", "workload": options.workload, "steps": engine.stats.steps,
        "microseconds_per_step": round(seconds / engine.stats.steps * 1e6, 1), **describe(torch.device("cpu")),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
