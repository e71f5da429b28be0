"""Searches the tiles of a decode step by timing whole captured steps; what it finds goes into modeling/decode_tiles.

    python benchmarks/tune_decode.py --shape 4B --rows 1 4

For each batch size it times the step as the rules have it, then one kind of product after another with each of the
candidates, and keeps what is faster. Times are device times of back-to-back replays, sampling included, without the
host. Random weights; the first use of each candidate compiles it.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch
from triton.errors import TritonError

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.bench_decode import Bench, build_model  # noqa: E402
from modeling.decode_tiles import AttentionTiles, Tiles, rows_tile  # noqa: E402

# (bn, bk, splits, stages, warps, ahead)
CANDIDATES: dict[str, list[tuple[int, ...]]] = {
    "o": [(64, 64, 6, 2, 4, 512), (64, 64, 4, 3, 4, 512), (64, 64, 3, 4, 4, 512), (64, 64, 5, 2, 4, 512)],
    "down": [(64, 64, 5, 6, 4, 256), (64, 64, 6, 4, 4, 256), (64, 64, 8, 4, 4, 256), (64, 64, 4, 6, 4, 256),
             (64, 64, 5, 5, 4, 128)],
    "qkv": [(64, 64, 3, 3, 4, 256), (64, 64, 2, 6, 4, 256), (64, 64, 5, 2, 4, 256), (64, 64, 4, 3, 4, 256)],
    "gate_up": [(64, 64, 1, 5, 4, 128), (64, 64, 1, 4, 4, 128), (64, 64, 1, 8, 4, 128), (128, 64, 1, 4, 4, 64)],
    "head": [(64, 64, 1, 6, 4, 128), (64, 64, 1, 3, 4, 256)],
}  # fmt: skip
ATTENTION = [AttentionTiles(*tiles) for tiles in (
    (64, 4, 7, 264, 0), (64, 4, 9, 132, 0), (64, 4, 9, 132, 64), (64, 4, 9, 132, 128), (32, 2, 7, 132, 0),
    (32, 2, 9, 264, 0), (64, 4, 9, 264, 64),
)]  # fmt: skip


def step_ms(decoder: Any, rows: int, replays: int = 40) -> float:
    """Device milliseconds of one captured step, the best of three means."""
    decoder._launch(rows, 1.0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decoder._launch(rows, 1.0)
    best = float("inf")
    for _ in range(4):  # the first warms up
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end) / replays)
    return best


def search(decoder: Any, rows: int, kinds: list[str], deadline: float) -> None:
    stack = decoder._stack
    best = step_ms(decoder, rows)
    print(f"rows={rows} by the rules: {best:.3f} ms", flush=True)
    for kind in kinds:
        for candidate in ATTENTION if kind == "attention" else CANDIDATES[kind]:
            if time.perf_counter() > deadline:
                break
            before, before_attention = dict(stack.override), stack.attention_override
            if isinstance(candidate, AttentionTiles):
                stack.attention_override = candidate
            else:
                bn, bk, splits, stages, warps, ahead = candidate
                stack.override[kind] = Tiles(bn, rows_tile(rows), bk, splits, stages, warps, ahead)
            try:
                took = step_ms(decoder, rows)
            except (RuntimeError, TritonError) as error:  # too much shared memory, no such layout: not this one
                print(f"  {kind} {candidate}: {type(error).__name__}", flush=True)
                took = float("inf")
            print(f"  {kind} {candidate}: {took:.3f}{' *' if took < best - 0.002 else ''}", flush=True)
            if took < best - 0.002:
                best = took
            else:
                stack.override, stack.attention_override = before, before_attention
    print(f"rows={rows} best {best:.3f} ms: {stack.override} {stack.attention_override}", flush=True)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="0.6B", help="0.6B, 4B, 8B, or a folder with config.json")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4])
    kinds = ["attention", *CANDIDATES]
    parser.add_argument("--kinds", nargs="+", choices=kinds, default=kinds)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--seconds", type=float, default=120, help="for the search of each batch size")
    options = parser.parse_args()
    model = build_model(options.shape)
    for rows in options.rows:
        bench = Bench(model, rows, options.context + 64, 16)
        bench.fill()
        bench.decoder.run(bench.step([1] * rows, options.context), 1.0)
        search(bench.decoder, rows, options.kinds, time.perf_counter() + options.seconds)


if __name__ == "__main__":
    main()
