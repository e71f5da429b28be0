"""Decoding speed of the graph decoder at any shape, with random weights, on one CUDA GPU.

    python benchmarks/bench_decode.py --shape 0.6B --points 16x1024 64x1024 64x4096 256x1024
    python benchmarks/bench_decode.py --shape 4B --points 64x1024 --driven 64x1024 --profile --mismatch
    python benchmarks/bench_decode.py --shape models/shapes/gpt-oss-20b --points 16x1024 64x1024 --mismatch
    python benchmarks/bench_decode.py --shape models/shapes/Qwen2.5-0.5B-Instruct --points 8x1024 [--eager]

For each point, sequences x context, it reports:

- the step time with every sequence at that context: `step_ms` with ids read within the step, `late_ms` with ids read
  one step late, as the engine does;
- the share of the floor, (weights + live keys and values) / copy bandwidth, which is measured first. Of experts the
  floor counts those that the last layer's tokens chose, of a sliding layer the keys in its window;
- start-up time and peak memory.

A `--driven` point also reads prompts of context - 256 tokens and then samples 512 tokens a sequence, as a server is
driven. `--mismatch` compares the log-probs of the draws with a plain Hugging Face forward, and that forward with one
with eager attention, for scale. For GPT-OSS the plain forward is the training forward; its experts are compared with
those of the draws, and replayed once. `--eager` decodes without graphs, as rollout.cuda_graphs=false does; it reads
ids within the step only. The last command above decodes the student of smoke_opsd.
The last line is JSON with commit, device and versions.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import torch
import triton
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.machine import describe  # noqa: E402
from benchmarks.mismatch import mismatch  # noqa: E402
from decode.cache import PagedCache  # noqa: E402
from decode.graphs import GraphDecoder  # noqa: E402
from decode.interface import LAST_DRAW  # noqa: E402
from decode.noise import row_key  # noqa: E402
from decode.prefill import FlashDecoder  # noqa: E402
from modeling.attention import IMPLEMENTATION  # noqa: E402
from modeling.experts import IMPLEMENTATION as EXPERTS  # noqa: E402
from modeling.routing import watch  # noqa: E402
from rollout.scheduler import Chunk  # noqa: E402

COMMON = {"vocab_size": 151936, "head_dim": 128, "num_key_value_heads": 8, "max_position_embeddings": 40960}
SHAPES = {  # Qwen3
    "0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
             "tie_word_embeddings": True},
    "4B": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32,
           "tie_word_embeddings": True},
    "8B": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
           "tie_word_embeddings": False},
}  # fmt: skip
STEPS = 48  # timed per point, centred on the context
DRAWS = 512  # of each sequence of a driven point
MISMATCH_ROWS, MISMATCH_PROMPT, MISMATCH_DRAWS = 16, 64, 192


def build_model(shape: str) -> Any:
    config = Qwen3Config(**COMMON, **SHAPES[shape]) if shape in SHAPES else AutoConfig.from_pretrained(shape)
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(
            config, attn_implementation=IMPLEMENTATION, experts_implementation=EXPERTS, dtype=torch.bfloat16
        )
    watch(model)
    return model.eval()


def copy_bandwidth() -> float:
    """Bytes per second of a large device-to-device copy, read and written bytes both counted."""
    source = torch.randn(1 << 29, device="cuda")
    target = torch.empty_like(source)
    best = math.inf
    for _ in range(12):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        torch.add(source, 1.0, out=target)
        end.record()
        torch.cuda.synchronize()
        best = min(best, start.elapsed_time(end) / 1e3)
    return 2 * source.numel() * 4 / best


class Bench:
    """One cache and one decoder for `rows` sequences of up to `length` tokens each."""

    def __init__(self, model: Any, rows: int, length: int, page_size: int, eager: bool = False):
        self.rows, self.length, self.page_size = rows, length, page_size
        self.per_row = math.ceil(length / page_size)
        self.cache = PagedCache(model.config, rows * self.per_row + 1, page_size, torch.bfloat16, "cuda")
        torch.cuda.synchronize()
        started = time.perf_counter()
        self.decoder: Any = FlashDecoder(model, self.cache)
        if not eager:
            self.decoder = GraphDecoder(
                model, self.cache, self.decoder, max_rows=rows, context_length=length, temperature=1.0
            )  # fmt: skip
        torch.cuda.synchronize()
        self.startup = time.perf_counter() - started
        pages = (torch.randperm(rows * self.per_row) + 1).view(rows, self.per_row)
        self.pages = pages.tolist()
        self.keys = [row_key(0, 0, row, 0) for row in range(rows)]

    def fill(self) -> None:
        for layer in self.cache.kv:
            layer.normal_()

    def chunk(self, row: int, tokens: list[int], start: int) -> Chunk:
        return Chunk(row, tokens, start, self.pages[row], self.keys[row], True)

    def step(self, tokens: list[int], start: int) -> list[Chunk]:
        return [self.chunk(row, [token], start) for row, token in enumerate(tokens)]


def decode_times(bench: Bench, context: int) -> tuple[float, float]:
    """Milliseconds per step with every sequence at `context`: ids read within the step; one step late (0 if eager)."""
    bench.fill()
    tokens = [1] * bench.rows
    first = context - STEPS // 2
    for position in range(first - 8, first):
        bench.decoder.run(bench.step(tokens, position), 1.0)
    torch.cuda.synchronize()
    started = time.perf_counter()
    for position in range(first, first + STEPS):
        tokens = bench.decoder.run(bench.step(tokens, position), 1.0).tokens
    within = time.perf_counter() - started
    if not bench.decoder.pipelined:
        return within / STEPS * 1e3, 0.0
    pending = bench.decoder.submit(bench.step(tokens, first), 1.0)
    late_tokens = [LAST_DRAW] * bench.rows
    torch.cuda.synchronize()
    started = time.perf_counter()
    for position in range(first + 1, first + STEPS):
        following = bench.decoder.submit(bench.step(late_tokens, position), 1.0)
        pending.read()
        pending = following
    pending.read()
    return within / STEPS * 1e3, (time.perf_counter() - started) / (STEPS - 1) * 1e3


def prompt_and_draws(bench: Bench, vocabulary: int, prompt: int, new: int, prefill_tokens: int) -> dict[str, float]:
    """Seconds of reading every prompt and then sampling `new` tokens each, as a server is driven."""
    prompts = torch.randint(0, vocabulary, (bench.rows, prompt)).tolist()
    at_once = max(1, prefill_tokens // prompt)
    for _ in range(2):  # the first time warms the libraries
        torch.cuda.synchronize()
        started = time.perf_counter()
        tokens: list[int] = []
        for row in range(0, bench.rows, at_once):
            some = range(row, min(row + at_once, bench.rows))
            tokens += bench.decoder.run([bench.chunk(r, prompts[r], 0) for r in some], 1.0).tokens
        read = time.perf_counter() - started
        for position in range(prompt, prompt + new - 1):
            tokens = bench.decoder.run(bench.step(tokens, position), 1.0).tokens
        total = time.perf_counter() - started
    return {
        "prompt": prompt, "new": new, "prefill_s": read, "total_s": total, "ms_per_step": total / new * 1e3,
        "tokens_per_s": bench.rows * new / total,
    }  # fmt: skip


def profile(bench: Bench, context: int) -> None:
    """Prints the kernels of a step. With overlapping launches a kernel's time includes its wait for the one before."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    steps = 5
    with torch.profiler.profile(activities=activities) as profiler:
        for position in range(context, context + steps):
            bench.decoder.run(bench.step([1] * bench.rows, position), 1.0)
        torch.cuda.synchronize()
    events = [event for event in profiler.key_averages() if event.self_device_time_total > 0]
    print(f"{'kernel':48} {'per step':>8} {'us each':>8} {'ms a step':>9}")
    for event in sorted(events, key=lambda event: -event.self_device_time_total):
        total = event.self_device_time_total
        print(f"{event.key[:48]:48} {event.count / steps:8.1f} {total / event.count:8.2f} {total / steps / 1e3:9.3f}")


def bytes_read(model: Any, bench: Bench, context: int) -> float:
    """Bytes that a step must read: weights once, live keys and values once; all experts when eager."""
    config = model.config
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    if not config.tie_word_embeddings:
        weights -= model.get_input_embeddings().weight.numel() * 2  # a step gathers a few of its rows
    stage = bench.decoder._stack.experts if bench.decoder.pipelined else None
    if stage is not None:
        of_experts = sum(p.numel() * p.element_size() for n, p in model.named_parameters() if ".experts." in n)
        weights -= of_experts * (1 - stage.ids[: bench.rows].unique().numel() / config.num_local_experts)
    kinds = getattr(config, "layer_types", None) or ["full_attention"]
    seen = [min(context, config.sliding_window) if kind == "sliding_attention" else context for kind in kinds]
    live = bench.rows * sum(seen) / len(seen) * PagedCache.bytes_per_token(config, torch.bfloat16)
    return weights + live


def measure(model: Any, rows: int, context: int, options: argparse.Namespace, bandwidth: float) -> dict[str, Any]:
    torch.cuda.reset_peak_memory_stats()
    driven = f"{rows}x{context}" in options.driven
    bench = Bench(model, rows, context + (DRAWS // 2 if driven else STEPS), options.page_size, options.eager)
    within, late = decode_times(bench, context)
    floor = bytes_read(model, bench, context) / bandwidth * 1e3
    result: dict[str, Any] = {
        "rows": rows, "context": context, "step_ms": within, "late_ms": late, "tokens_per_s": rows / within * 1e3,
        "floor_ms": floor, "share_of_floor": floor / within, "startup_s": bench.startup,
        "captures": getattr(bench.decoder, "captures", 0),
    }  # fmt: skip
    if driven:
        result["driven"] = prompt_and_draws(
            bench, model.config.vocab_size, context - DRAWS // 2, DRAWS, options.prefill_tokens
        )  # fmt: skip
    if options.profile:
        profile(bench, context)
    result["allocated_gb"] = torch.cuda.max_memory_allocated() / 1e9
    result["reserved_gb"] = torch.cuda.max_memory_reserved() / 1e9
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="0.6B", help=f"{', '.join(SHAPES)}, or a folder with config.json")
    parser.add_argument("--points", nargs="+", default=["16x1024", "64x1024"], metavar="ROWSxCONTEXT")
    parser.add_argument("--driven", nargs="*", default=[], metavar="ROWSxCONTEXT", help="points to drive as well")
    parser.add_argument("--prefill-tokens", type=int, default=16384, help="prompt tokens read in one step")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--mismatch", action="store_true")
    options = parser.parse_args()
    started = time.perf_counter()
    model = build_model(options.shape)
    bandwidth = copy_bandwidth()
    print(f"{options.shape}: built in {time.perf_counter() - started:.1f} s; copy {bandwidth / 1e12:.2f} TB/s")
    results: dict[str, Any] = {
        "shape": options.shape,
        "graphs": not options.eager,
        "copy_tb_s": bandwidth / 1e12,
        "points": [],
    }
    for name in options.points:
        rows, context = map(int, name.split("x"))
        point = measure(model, rows, context, options, bandwidth)
        results["points"].append(point)
        print(" ".join(f"{k}={v:.3f}" if isinstance(v, float) else f"{k}={v}" for k, v in point.items()), flush=True)
        torch.cuda.empty_cache()
    if options.mismatch:
        bench = Bench(model, MISMATCH_ROWS, MISMATCH_PROMPT + MISMATCH_DRAWS, options.page_size)
        results["mismatch"] = mismatch(model, bench, MISMATCH_PROMPT, MISMATCH_DRAWS)
        print(results["mismatch"])
    print(json.dumps({**results, **describe(torch.device("cuda")), "triton": triton.__version__}))


if __name__ == "__main__":
    main()
