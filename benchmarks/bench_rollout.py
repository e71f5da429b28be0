"""Scripted multi-turn rollouts: every length and every tool latency is fixed, so engines can be compared.

    python benchmarks/bench_rollout.py --shape Qwen3-0.6B --workload retool_64 [--tools both] [--repeat 2]
    torchrun --standalone --nproc-per-node 2 benchmarks/bench_rollout.py --workload retool_256 --copies 2 --rows 256
    python benchmarks/bench_rollout.py --shape Qwen2.5-0.5B-Instruct [--eager]     (the student of smoke_opsd)

Random weights at the true shape, bf16, temperature 1, log-probs recorded. A turn samples exactly its scripted number
of tokens and ignores stop tokens; after its tool latency the scripted number of tool tokens is appended, never
sampled. Floor: every sequential step of the longest trajectory reads the weights once, every sampled token reads its
past once, at the measured read bandwidth. Prints one JSON line for each kind of tool (with latency, instant, or both
and their ratio). "balance" is the whole over max(longest trajectory, mean over ranks), the lower bound of any
distribution over ranks. `benchmarks/peers` drives other engines over the same workloads.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import sys
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.machine import describe, read_bandwidth
from benchmarks.scripted import ScriptedRun, TimeUp
from benchmarks.step_times import StepTimes
from benchmarks.workload import length_of, load_workload, scripts_of
from decode.cache import PagedCache
from modeling.attention import IMPLEMENTATION
from modeling.loading import SHIPPED
from rollout.engine import RolloutEngine, RolloutRequest
from rollout.records import SamplingConfig
from run.ranks import Ranks
from startup.building import build_decoder
from update.groups import SampledStep

CONTEXT = 8192


def floor_seconds(rows: list[dict], weight_bytes: int, token_bytes: int, bandwidth: float, ranks: int) -> float:
    """Weights once per sequential step, each sampled token's past once, on one of the ranks."""
    steps = max(sum(turn["new_tokens"] for turn in row["turns"]) for row in rows)
    past = 0
    for row in rows:
        length = row["prompt_tokens"]
        for turn in row["turns"]:
            count = turn["new_tokens"]
            past += count * length + count * (count - 1) // 2
            length += count + turn.get("tool_tokens", 0)
    return (steps * weight_bytes + past * token_bytes / ranks) / bandwidth


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="Qwen3-0.6B", help="a folder of models/shapes")
    parser.add_argument("--workload", default="retool_64")
    parser.add_argument("--copies", type=int, default=1, help="repeat the workload this often, with other prompts")
    parser.add_argument("--tools", choices=["latency", "instant", "both"], default="latency")
    parser.add_argument("--rows", type=int, default=64, help="rollout.decode_rows of each process")
    parser.add_argument("--kv-tokens", type=int, default=None, help="default: what all trajectories together need")
    parser.add_argument("--forced-tokens", type=int, default=512, help="rollout.forced_tokens")
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    parser.add_argument("--by-rows", action="store_true", help="also device time by sequences in a step, on one GPU")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--limit", type=float, default=600.0, help="seconds after which a rollout is cut short")
    run(parser.parse_args())


def run(options: argparse.Namespace) -> None:
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    ranks = Ranks()
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    elif options.by_rows:
        raise SystemExit("error: --by-rows: device time needs a GPU; leave it out")
    rows, samples = load_workload(options.workload, options.copies, context=CONTEXT)
    engine, model, cache, start_seconds = build_engine(options, rows, device)
    bandwidth = read_bandwidth(device)
    times = StepTimes(engine._decoder) if options.by_rows else None
    best = {}
    for tools in ("latency", "instant") if options.tools == "both" else (options.tools,):
        engine.run_type.instant = tools == "instant"
        results = [rollout(engine, ranks, rows, samples, f"{tools} {n}", options.limit) for n in range(options.repeat)]
        best[tools] = min(results, key=lambda r: r["seconds"])
        if ranks.rank == 0:
            line = {
                "tools": tools, "all_seconds": [r["seconds"] for r in results], "start_seconds": start_seconds,
            }  # fmt: skip
            report(options, rows, model, cache, bandwidth, best[tools], line | describe(device))
            if times:
                print(times.table())  # of all repeats
    if len(best) == 2 and ranks.rank == 0:
        print(json.dumps({"latency_over_instant": round(best["latency"]["seconds"] / best["instant"]["seconds"], 3)}))


def build_engine(options: argparse.Namespace, rows: list[dict], device: torch.device):
    started = time.perf_counter()
    config = AutoConfig.from_pretrained(SHIPPED / options.shape)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=IMPLEMENTATION).eval()
    tokens = options.kv_tokens or sum(map(length_of, rows)) + 32 * len(rows)
    pages = 1 + -(-tokens // 16)
    cache = PagedCache(config, pages, 16, dtype, device)
    settings = SimpleNamespace(
        rollout=SimpleNamespace(
            cuda_graphs=not options.eager, decode_rows=options.rows, context_length=CONTEXT, temperature=1.0,
            forced_tokens=options.forced_tokens,
        ),
        model=SimpleNamespace(attn_implementation="auto", dtype=str(dtype).removeprefix("torch.")),
        eval=SimpleNamespace(path=""),
    )  # fmt: skip
    decoder = build_decoder(settings, model, cache, device)
    chat = SimpleNamespace(stop_ids=frozenset())
    run_type = type("Run", (ScriptedRun,), {"scripts": scripts_of(rows)})
    engine = RolloutEngine(
        decoder, chat, object(), decode_rows=options.rows, page_size=16, num_pages=pages, prefill_tokens=8192,
        forced_tokens=options.forced_tokens if decoder.pipelined else 0, step_rows=decoder.step_rows,
        progress=run_type.watch,
    )  # fmt: skip
    engine.run_type = run_type
    return engine, model, cache, round(time.perf_counter() - started, 1)


def rollout(engine: RolloutEngine, ranks: Ranks, rows: list[dict], samples: int, name: str, limit: float) -> dict:
    """One rollout of the whole workload; seconds from the first submission to the last token over all ranks."""
    generator = random.Random(name)
    lengths = {row["prompt"]: row["prompt_tokens"] for row in rows}
    prompts = [[generator.randrange(300) for _ in range(lengths[i])] for i in range(len(lengths))]
    sampling = SamplingConfig(
        max_new_tokens=CONTEXT - 1, temperature=1.0, n_samples_per_prompt=samples, max_turns=64,
        context_length=CONTEXT, seed=generator.randrange(1 << 30),
    )  # fmt: skip
    ranks.gather(None)
    started = time.perf_counter()
    engine.run_type.longest, engine.run_type.deadline = 0.0, started + limit
    records = []
    with contextlib.suppress(TimeUp):
        records = engine.generate(RolloutRequest(prompts, 0, ranks.deal(f"bench {name}", len(rows))), sampling)
    mine = engine.stats.seconds = time.perf_counter() - started
    expected = {(row["prompt"], row["sample"]): sum(t["new_tokens"] for t in row["turns"]) for row in rows}
    for record in records:
        assert record.num_sampled == expected[record.prompt_index, record.sample_index]
    parts = ranks.gather((mine, len(records), engine.stats, engine.run_type.longest))
    return {
        "seconds": round(max(p[0] for p in parts), 3), "per_rank": [round(p[0], 3) for p in parts],
        "complete": sum(p[1] for p in parts) == len(rows), "tokens": sum(p[2].decode_tokens for p in parts),
        "longest": max(p[3] for p in parts), "stats": [p[2] for p in parts],
    }  # fmt: skip


def report(options, rows, model, cache, bandwidth: float, best: dict, line: dict) -> None:
    weight_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    token_bytes = PagedCache.bytes_per_token(model.config, cache.kv.dtype)
    count, seconds = len(best["per_rank"]), best["seconds"]
    floor = floor_seconds(rows, weight_bytes, token_bytes, bandwidth, count)
    step = SampledStep()
    step.add([], [], [], asdict(best["stats"][0]))
    figures = {name.removeprefix("rollout_"): round(value, 3) for name, value in step.rollout_row().items()}
    print(json.dumps({
        "benchmark": "rollout", "shape": options.shape, "workload": options.workload, "copies": options.copies,
        "ranks": count, "decode_rows": options.rows, "forced_tokens": options.forced_tokens,
        "graphs": not options.eager, "complete": best["complete"], "seconds": seconds, "per_rank": best["per_rank"],
        "sampled_tokens": best["tokens"], "tokens_per_second": round(best["tokens"] / seconds),
        "floor_seconds": round(floor, 3), "over_floor": round(seconds / floor, 3),
        "longest_seconds": round(best["longest"], 3),
        "balance": round(seconds / max(best["longest"], sum(best["per_rank"]) / count), 3),
        **line, "first_rank": figures,
    }))  # fmt: skip


if __name__ == "__main__":
    main()
