"""Simulated seconds of a scripted rollout: the real engine and scheduler on a clock that a formula moves.

    python benchmarks/simulate_rollout.py --workload retool_256 --rows 256 --step-ms 0.78 --row-us 3.7 --token-kb 114.7

A step takes step-ms, row-us for every token in it, and the reading of every key once at 4.27 TB/s. Tools answer after
their scripted latency on the same clock. Host time is assumed to hide behind the device. Defaults: Qwen3-0.6B, H200.
"""

from __future__ import annotations

import argparse
import heapq
import json
import sys
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.bench_rollout import CONTEXT, rollout
from benchmarks.scripted import ScriptedRun
from benchmarks.workload import load_workload, scripts_of
from decode.graphs import rows_beside
from decode.interface import Chunk, Done, Draws
from rollout.engine import RolloutEngine
from rollout.records import Work
from rollout.stats import RolloutStats

BANDWIDTH = 4.27e12  # bytes per second, measured on an H200


class Clock:
    now = 0.0


class TimedDecoder:
    """Draws the same token everywhere; a step moves the clock."""

    pipelined, captures = True, 0

    def __init__(self, clock: Clock, step_seconds: float, row_seconds: float, token_bytes: float):
        self._clock, self._step, self._row, self._token = clock, step_seconds, row_seconds, token_bytes

    def submit(self, chunks: Sequence[Chunk], temperature: float) -> Done:
        rows = sum(len(c.token_ids) for c in chunks)
        keys = sum(len(c.token_ids) * (c.start + len(c.token_ids)) for c in chunks)
        self._clock.now += self._step + self._row * rows + keys * self._token / BANDWIDTH
        count = sum(c.sample for c in chunks)
        return Done(Draws([5] * count, [-1.0] * count))


class TimedRun(ScriptedRun):
    """Tools answer when the clock says so."""

    clock: Clock
    due: list[tuple[float, int, Future]]  # a heap

    def start_tool(self, seconds: float) -> Future:
        future: Future = Future()
        heapq.heappush(self.due, (self.clock.now + seconds, id(future), future))
        return future

    def deliver(self, wait_for_all: bool) -> None:
        while self.due and self.due[0][0] <= self.clock.now:
            heapq.heappop(self.due)[2].set_result(None)
        super().deliver(wait_for_all)

    def wait_for_a_tool(self) -> None:
        self.clock.now = self.due[0][0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="retool_64")
    parser.add_argument("--rows", type=int, default=64, help="rollout.decode_rows")
    parser.add_argument("--kv-tokens", type=int, default=960_000)
    parser.add_argument("--step-ms", type=float, default=0.78)
    parser.add_argument("--row-us", type=float, default=3.7)
    parser.add_argument("--token-kb", type=float, default=114.7, help="keys and values of one token, 1000 bytes")
    parser.add_argument("--instant", action="store_true", help="every tool answers at once")
    options = parser.parse_args()
    clock = Clock()
    decoder = TimedDecoder(clock, options.step_ms / 1e3, options.row_us / 1e6, options.token_kb * 1e3)
    stats = simulate(options.workload, decoder, clock, options.rows, options.kv_tokens, options.instant)
    print(json.dumps({
        **vars(options), "seconds": round(clock.now, 2), "steps": stats.steps,
        "prefill_tokens": stats.prefill_tokens, "preemptions": stats.preemptions,
    }))  # fmt: skip


def simulate(
    workload: str, decoder: Any, clock: Clock, decode_rows: int, kv_tokens: int = 960_000, instant: bool = False
) -> RolloutStats:
    """One rollout of a workload by a decoder that moves the clock."""
    rows, samples = load_workload(workload, context=CONTEXT)
    chat: Any = SimpleNamespace(stop_ids=frozenset())
    tool: Any = object()
    engine = RolloutEngine(
        decoder, chat, tool, decode_rows=decode_rows, page_size=16, num_pages=1 + kv_tokens // 16, prefill_tokens=8192,
        forced_tokens=512, step_rows=decode_rows + rows_beside(decode_rows),
    )  # fmt: skip
    engine.run_type = type("Run", (TimedRun,), {
        "scripts": scripts_of(rows), "instant": instant, "clock": clock, "due": [],
    })  # fmt: skip
    alone: Any = SimpleNamespace(gather=lambda item: [item], deal=lambda *_: Work())
    rollout(engine, alone, rows, samples, "simulation", limit=600.0)
    return engine.stats


if __name__ == "__main__":
    main()
