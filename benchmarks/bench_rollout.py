"""Scripted multi-turn rollouts: every length and every tool latency fixed, so that engines can be compared.

    python benchmarks/bench_rollout.py --shape Qwen3-0.6B --workload retool_64 [--instant] [--repeat 2]
    torchrun --standalone --nproc-per-node 2 benchmarks/bench_rollout.py --workload retool_256 --copies 2

Random weights at the true shape, bf16, temperature 1, log-probs recorded. A turn samples exactly its scripted number
of tokens (stop tokens ignored); after its tool latency the scripted number of tool tokens is appended, never sampled.
Floor: every sequential step of the longest trajectory reads the weights once, every sampled token reads its past once,
at the measured read bandwidth. Prints a table and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.machine import describe, read_bandwidth
from building import build_decoder
from modeling.attention import IMPLEMENTATION
from modeling.shapes import SHIPPED
from ranks import Ranks
from rollout.cache import PagedCache
from rollout.calls import OpenTurn
from rollout.engine import RolloutEngine, RolloutRequest, RolloutRun
from rollout.episode import Episode
from rollout.records import SamplingConfig, StopReason

CONTEXT = 8192


class ScriptedEpisode(Episode):
    """A trajectory whose turns have the lengths of the script."""

    def __init__(self, script: dict, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.script = script

    @property
    def max_turn_tokens(self) -> int:
        return self.script["turns"][self.turn_index]["new_tokens"]


class ScriptedRun(RolloutRun):
    """Ends turns by the script; a tool call is a timer."""

    scripts: dict[tuple[int, int], dict]
    instant = False

    def new_episode(self, prompt, prompt_index, sample_index):
        return ScriptedEpisode(
            self.scripts[prompt_index, sample_index], prompt, prompt_index=prompt_index, sample_index=sample_index,
            policy_step=0, sampling=self._sampling,
        )  # fmt: skip

    def end_turn(self, slot, episode, ended):
        turn = episode.script["turns"][episode.turn_index]
        if "tool_tokens" not in turn:
            episode.close_turn(ended=False)
            self.finish(slot, StopReason.ANSWERED)
            return
        self.scheduler.park(slot)
        future: Future = Future()
        seconds = 0.0 if self.instant else turn["tool_seconds"]
        threading.Timer(seconds, future.set_result, [None]).start() if seconds else future.set_result(None)
        self.open_turns.append(OpenTurn(episode, slot, False, [], [future]))

    def deliver_turn(self, turn):
        self._stats.tool_seconds += time.perf_counter() - turn.submitted
        count = turn.episode.script["turns"][turn.episode.turn_index]["tool_tokens"]
        turn.episode.close_turn(ended=False)
        turn.episode.append_suffix([random.randrange(300) for _ in range(count)])
        self.scheduler.resume(turn.slot)


def load_workload(name: str, copies: int) -> tuple[list[dict], int]:
    """Trajectories, `copies` times with other prompts, and samples per prompt."""
    data = json.loads((Path(__file__).parent / "workloads" / f"{name}.json").read_text())
    prompts = data["meta"]["prompts"]
    rows = [row | {"prompt": row["prompt"] + c * prompts} for c in range(copies) for row in data["trajectories"]]
    return rows, data["meta"]["samples_per_prompt"]


def floor_seconds(rows: list[dict], weight_bytes: int, token_bytes: int, bandwidth: float) -> float:
    """Weights once per sequential step, each sampled token's past once."""
    steps = max(sum(turn["new_tokens"] for turn in row["turns"]) for row in rows)
    past = 0
    for row in rows:
        length = row["prompt_tokens"]
        for turn in row["turns"]:
            count = turn["new_tokens"]
            past += count * length + count * (count - 1) // 2
            length += count + turn.get("tool_tokens", 0)
    return (steps * weight_bytes + past * token_bytes) / bandwidth


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="Qwen3-0.6B", help="a folder of models/shapes")
    parser.add_argument("--workload", default="retool_64")
    parser.add_argument("--copies", type=int, default=1, help="the workload this many times, with other tokens")
    parser.add_argument("--instant", action="store_true", help="every tool answers at once")
    parser.add_argument("--rows", type=int, default=64, help="rollout.decode_rows of each process")
    parser.add_argument("--kv-tokens", type=int, default=None, help="default: what all trajectories together need")
    parser.add_argument("--forced-tokens", type=int, default=512, help="rollout.forced_tokens")
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    parser.add_argument("--repeat", type=int, default=1)
    options = parser.parse_args()
    run(options)


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
    rows, samples = load_workload(options.workload, options.copies)
    engine, model, cache, start_seconds = build_engine(options, rows, device)
    results = [rollout(engine, ranks, rows, samples, number) for number in range(options.repeat)]
    if ranks.rank == 0:
        report(options, rows, model, cache, results, start_seconds, device)


def build_engine(options: argparse.Namespace, rows: list[dict], device: torch.device):
    started = time.perf_counter()
    config = AutoConfig.from_pretrained(SHIPPED / options.shape)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=IMPLEMENTATION).eval()
    lengths = [
        row["prompt_tokens"] + sum(t["new_tokens"] + t.get("tool_tokens", 0) for t in row["turns"]) for row in rows
    ]
    tokens = options.kv_tokens or sum(lengths) + 32 * len(lengths)
    pages = 1 + -(-tokens // 16)
    cache = PagedCache(config, pages, 16, dtype, device)
    settings = SimpleNamespace(
        rollout=SimpleNamespace(
            cuda_graphs=not options.eager,
            decode_rows=options.rows,
            context_length=CONTEXT,
            temperature=1.0,
            forced_tokens=options.forced_tokens,
        ),
        model=SimpleNamespace(attn_implementation="auto", dtype=str(dtype).removeprefix("torch.")),
        eval=SimpleNamespace(path=""),
    )
    decoder = build_decoder(settings, model, cache, device)
    chat = SimpleNamespace(stop_ids=frozenset())
    engine = RolloutEngine(
        decoder, chat, object(), decode_rows=options.rows, page_size=16, num_pages=pages, prefill_tokens=8192,
        forced_tokens=options.forced_tokens if decoder.pipelined else 0, step_rows=decoder.step_rows,
    )  # fmt: skip
    engine.run_type = type("Run", (ScriptedRun,), {
        "scripts": {(row["prompt"], row["sample"]): row for row in rows}, "instant": options.instant,
    })  # fmt: skip
    return engine, model, cache, time.perf_counter() - started


def rollout(engine: RolloutEngine, ranks: Ranks, rows: list[dict], samples: int, number: int) -> dict:
    """One rollout of the whole workload; seconds from the first submission to the last token over all ranks."""
    generator = random.Random(number)
    lengths = {row["prompt"]: row["prompt_tokens"] for row in rows}
    prompts = [[generator.randrange(300) for _ in range(lengths[i])] for i in range(len(lengths))]
    sampling = SamplingConfig(
        max_new_tokens=CONTEXT - 1, temperature=1.0, n_samples_per_prompt=samples, max_turns=64,
        context_length=CONTEXT, seed=number,
    )  # fmt: skip
    ranks.gather(None)
    started = time.perf_counter()
    records = engine.generate(RolloutRequest(prompts, 0, ranks.counter(f"bench {number}")), sampling)
    mine = time.perf_counter() - started
    expected = {(row["prompt"], row["sample"]): sum(t["new_tokens"] for t in row["turns"]) for row in rows}
    for record in records:
        assert record.num_sampled == expected[record.prompt_index, record.sample_index]
    parts = ranks.gather((mine, len(records), sum(r.num_sampled for r in records), engine.stats))
    assert sum(part[1] for part in parts) == len(rows)
    return {
        "seconds": max(p[0] for p in parts), "per_rank": [p[0] for p in parts], "tokens": sum(p[2] for p in parts),
        "stats": parts[0][3],
    }  # fmt: skip


def report(options, rows, model, cache, results, start_seconds, device) -> None:
    best = min(results, key=lambda r: r["seconds"])
    weight_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    bandwidth = read_bandwidth(device)
    token_bytes = PagedCache.bytes_per_token(model.config, cache.kv.dtype)
    floor = floor_seconds(rows, weight_bytes, token_bytes, bandwidth) / len(best["per_rank"])
    stats = best["stats"]
    line = {
        "benchmark": "rollout", "shape": options.shape, "workload": options.workload, "copies": options.copies,
        "ranks": len(best["per_rank"]), "instant_tools": options.instant, "decode_rows": options.rows,
        "forced_tokens": options.forced_tokens,
        "graphs": not options.eager, "seconds": round(best["seconds"], 3),
        "all_seconds": [round(r["seconds"], 3) for r in results], "per_rank": [round(s, 3) for s in best["per_rank"]],
        "sampled_tokens": best["tokens"], "tokens_per_second": round(best["tokens"] / best["seconds"]),
        "floor_seconds": round(floor, 3), "floor_share": round(floor / best["seconds"], 3), "steps": stats.steps,
        "mean_rows": round(stats.running_rows / max(stats.steps, 1), 2), "idle_seconds": round(stats.idle_seconds, 3),
        "tool_seconds": round(stats.tool_seconds, 3), "prefill_tokens": stats.prefill_tokens,
        "reused_tokens": stats.reused_tokens, "preemptions": stats.preemptions,
        "start_seconds": round(start_seconds, 1), **describe(device),
    }  # fmt: skip
    print(json.dumps(line))


if __name__ == "__main__":
    main()
