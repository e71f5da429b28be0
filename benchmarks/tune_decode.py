"""Searches the tiles of a decode step by timing whole captured steps; what it finds goes into decode/tiles.py.

    python benchmarks/tune_decode.py --shape 4B --rows 1 4 --context 1024
    python benchmarks/tune_decode.py --shape 4B --rows 8 32 64 --wide 128 --workload retool_64 --kinds qkv o

For each size of graph it times the step with the shipped tiles, then with each candidate of one kind of product after
another, and keeps what is faster. All sequences have one context; with --workload they have the lengths that steps of
that size have in its simulated rollout, mixed as in training. --wide: sizes whose steps also carry longer chunks
(`decode.graphs`); needs a workload. Times are device times of back-to-back replays, sampling included, without the
host. Random weights; the first use of each candidate compiles it.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
from triton.errors import TritonError

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.bench_decode import build_model  # noqa: E402
from benchmarks.simulate_rollout import Clock, TimedDecoder, simulate  # noqa: E402
from decode.cache import PagedCache  # noqa: E402
from decode.graphs import fill_step, ladder, rotary_table, rows_beside, wide_ladder  # noqa: E402
from decode.sampling_kernel import HeadSampler  # noqa: E402
from decode.stack import STEP_FIELDS, DecodeStack  # noqa: E402
from decode.tiles import AttentionTiles, Tiles, rows_tile  # noqa: E402
from decode.weights import decode_weights  # noqa: E402
from rollout.scheduler import Chunk  # noqa: E402

Step = list[tuple[int, int]]  # of each sequence: tokens before this step, tokens in it

# (bn, bk, splits, stages, warps, ahead)
CANDIDATES: dict[str, list[tuple[int, ...]]] = {
    "o": [(64, 64, 6, 2, 4, 512), (64, 64, 3, 5, 4, 512), (64, 64, 3, 6, 4, 256), (64, 128, 3, 3, 4, 256),
          (64, 64, 3, 5, 4, 64)],
    "down": [(64, 64, 5, 5, 4, 256), (64, 64, 6, 4, 4, 256), (64, 64, 4, 6, 4, 256), (64, 128, 3, 4, 4, 128),
             (64, 64, 3, 5, 4, 64)],
    "qkv": [(64, 64, 3, 3, 4, 256), (64, 64, 2, 6, 4, 256), (64, 64, 1, 8, 4, 128), (64, 128, 1, 4, 4, 128),
            (128, 64, 2, 4, 8, 64)],
    "gate_up": [(64, 64, 1, 4, 4, 256), (64, 64, 1, 4, 4, 128), (64, 64, 1, 8, 4, 128), (128, 64, 1, 4, 4, 64),
                (128, 64, 1, 3, 8, 64)],
    "head": [(64, 64, 1, 6, 4, 128), (64, 64, 1, 3, 4, 256), (128, 64, 1, 4, 4, 64)],
}  # fmt: skip
ATTENTION = [AttentionTiles(*tiles) for tiles in (
    (64, 4, 7, 264, 0), (64, 4, 9, 132, 0), (64, 4, 9, 132, 64), (64, 4, 9, 132, 128), (32, 2, 7, 528, 0),
    (32, 2, 9, 264, 0), (64, 4, 9, 264, 64),
)]  # fmt: skip
PAGE = 16
SAMPLES = 5  # steps of a workload that are timed for each size


class Recorder(TimedDecoder):
    """Keeps every step of a simulated rollout, by the size of the graph that it takes."""

    def __init__(self, clock: Clock, decode_rows: int):
        super().__init__(clock, step_seconds=0.00256, row_seconds=6e-6, token_bytes=147e3)  # 4B's: any will do
        self._sizes = ladder(decode_rows), wide_ladder(decode_rows, rows_beside(decode_rows))
        self.steps: dict[tuple[bool, int], list[Step]] = {}

    def submit(self, chunks: Any, temperature: float) -> Any:
        rows = sum(len(chunk.token_ids) for chunk in chunks)
        wide = rows > len(chunks)
        size = next(size for size in self._sizes[wide] if size >= rows)
        self.steps.setdefault((wide, size), []).append([(c.start, len(c.token_ids)) for c in chunks])
        return super().submit(chunks, temperature)


def steps_of(options: argparse.Namespace, wide: bool, size: int) -> list[Step]:
    if not options.workload:
        return [[(options.context - 1, 1)] * size]
    clock = Clock()
    recorder = Recorder(clock, options.decode_rows)
    simulate(options.workload, recorder, clock, options.decode_rows)
    found = recorder.steps.get((wide, size), [])
    if not found:
        raise SystemExit(
            f"error: no step of {options.workload} takes size {size}; name one of {sorted(recorder.steps)}"
        )
    return random.Random(0).sample(found, min(SAMPLES, len(found)))


class Timer:
    """A decode stack over a cache that holds any of the given steps."""

    def __init__(self, model: Any, size: int, wide: bool, steps: list[Step], max_rows: int):
        self.size, self.wide, self._head_rows = size, wide, min(size, max_rows)
        tokens = max(sum(-(-(start + count) // PAGE) for start, count in step) for step in steps)
        context = max(start + count for step in steps for start, count in step) + PAGE
        cache = PagedCache(model.config, tokens + 1, PAGE, torch.bfloat16, "cuda")
        for layer in cache.kv:
            layer.normal_()
        table = torch.zeros(size + 1, math.ceil(context / PAGE), dtype=torch.int32, device="cuda")
        last = torch.zeros(size + 1, dtype=torch.int32, device="cuda")
        rotary = rotary_table(model, context, torch.bfloat16)
        self.stack = DecodeStack(decode_weights(model), cache.kv, table, last, rotary, size, overlap=True)
        self._head = HeadSampler(self.stack, self._head_rows)
        pages = (torch.randperm(tokens) + 1).tolist()
        self._steps = [self._chunks(step, pages) for step in steps]

    def _chunks(self, step: Step, pages: list[int]) -> list[Chunk]:
        chunks, taken = [], 0
        for row, (start, count) in enumerate(step):
            own = -(-(start + count) // PAGE)
            chunks.append(Chunk(row, [1] * count, start, pages[taken : taken + own], (row, 1), True))
            taken += own
        return chunks

    def _launch(self) -> None:
        self.stack.launch(self.size, together=self.wide)
        self._head.launch(self._head_rows, 1.0)

    def ms(self, replays: int = 20) -> float:
        """Device milliseconds of a step: for each of the steps the best of three means, and their mean."""
        self.stack.step.zero_()
        self._launch()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._launch()
        total = 0.0
        for chunks in self._steps:
            view = torch.zeros(STEP_FIELDS, self.size, dtype=torch.int32)
            fill_step(view.numpy(), chunks, PAGE, self.stack.tokens)
            self.stack.step.copy_(view)
            for chunk in chunks:
                self.stack.table[chunk.lane + 1, : len(chunk.pages)] = torch.tensor(chunk.pages, dtype=torch.int32)
            total += min(replay_ms(graph, replays) for _ in range(4))  # the first warms up
        return total / len(self._steps)


def replay_ms(graph: torch.cuda.CUDAGraph, replays: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / replays


def search(timer: Timer, name: str, kinds: list[str], deadline: float) -> None:
    stack = timer.stack
    best = timer.ms()
    print(f"{name} by the rules: {best:.3f} ms", flush=True)
    for kind in kinds:
        for candidate in ATTENTION if kind == "attention" else CANDIDATES[kind]:
            if time.perf_counter() > deadline:
                break
            before, before_attention = dict(stack.override), stack.attention_override
            if isinstance(candidate, AttentionTiles):
                stack.attention_override = candidate
            else:
                bn, bk, splits, stages, warps, ahead = candidate
                bm = min(rows_tile(timer.size), 64) if kind == "head" else rows_tile(timer.size)
                stack.override[kind] = Tiles(bn, bm, bk, splits, stages, warps, ahead)
            try:
                took = timer.ms()
            except (RuntimeError, ValueError, TritonError) as error:  # too much shared memory, an empty split
                print(f"  {kind} {candidate}: {type(error).__name__}", flush=True)
                took = float("inf")
            print(f"  {kind} {candidate}: {took:.3f}{' *' if took < best - 0.003 else ''}", flush=True)
            if took < best - 0.003:
                best = took
            else:
                stack.override, stack.attention_override = before, before_attention
    print(f"{name} best {best:.3f} ms: {stack.override} {stack.attention_override}", flush=True)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="0.6B", help="0.6B, 4B, 8B, or a folder with config.json")
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 4])
    parser.add_argument("--wide", type=int, nargs="*", default=[])
    kinds = ["attention", *CANDIDATES]
    parser.add_argument("--kinds", nargs="*", choices=kinds, default=kinds, help="none: only the rules are timed")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--workload", default="", help="a file of benchmarks/workloads")
    parser.add_argument("--decode-rows", type=int, default=64, help="of the simulated rollout")
    parser.add_argument("--seconds", type=float, default=120, help="for the search of each size")
    options = parser.parse_args()
    if options.wide and not options.workload:
        parser.error("--wide needs the steps of a --workload")
    model = build_model(options.shape)
    for wide, size in [*((False, size) for size in options.rows), *((True, size) for size in options.wide)]:
        timer = Timer(model, size, wide, steps_of(options, wide, size), options.decode_rows)
        name = f"{'wide ' if wide else ''}rows={size}"
        search(timer, name, options.kinds, time.perf_counter() + options.seconds)
        del timer


if __name__ == "__main__":
    main()
