"""One optimizer step under ZeRO-2 at a true shape with random weights, on trajectories of a scripted workload.

    python benchmarks/bench_update.py --shape Qwen3-0.6B [--workload retool_64] [--profile]
    python benchmarks/bench_update.py --shape Qwen3-0.6B --rows 4 --prompt 2048 --response 1024
    torchrun --nproc_per_node 2 benchmarks/bench_update.py --shape Qwen3-0.6B

Share: 6 x parameters x tokens of trained sequences per second and process over the measured rate of a bf16 product;
recomputation and padding count as waste. `--profile` adds one step under the profiler and prints its time by kinds of
kernels. Prints one JSON line on rank 0.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent.parent))

import policy as policy_module
from benchmarks.kernels import kernel_times, time_table
from benchmarks.machine import describe, matrix_rate
from benchmarks.workload import load_workload
from config import Config, parse_config
from configs.schema import apply_override
from policy import Policy, init_distributed
from rollout.records import RolloutRecord, Scored, StopReason, Turn
from startup.building import plan_memory
from update.batch import collate
from update.minibatch import token_weights
from update.update import OneUpdate, update

VOCABULARY = 100_000  # ids are drawn below it


def scripted_records(rows: list[dict], vocabulary: int) -> list[Scored]:
    """Records with the script's lengths and random ids; half of each group is right."""
    generator, scored = random.Random(0), []
    for row in rows:
        sampled, turns = [False] * row["prompt_tokens"], []
        for turn in row["turns"]:
            start = len(sampled)
            sampled += [True] * turn["new_tokens"]
            turns.append(Turn(start=start, end=len(sampled), ended=True))
            sampled += [False] * turn.get("tool_tokens", 0)
        record = RolloutRecord(
            prompt_index=row["prompt"], sample_index=row["sample"], policy_step=0,
            token_ids=tuple(generator.randrange(vocabulary) for _ in sampled), sampled=tuple(sampled),
            logprobs=tuple(-1.0 if drawn else 0.0 for drawn in sampled), turns=tuple(turns), stop=StopReason.ANSWERED,
        )  # fmt: skip
        reward = 1.0 if row["sample"] % 2 else -1.0
        scored.append(Scored(record=record, reward=reward, reason="correct", advantage=reward))
    return scored


def script(options: argparse.Namespace) -> list[dict]:
    if not options.rows:
        return load_workload(options.workload, options.copies)[0]
    turn = {"new_tokens": options.response}
    return [{"prompt": 0, "sample": i, "prompt_tokens": options.prompt, "turns": [turn]} for i in range(options.rows)]


def settings(options: argparse.Namespace) -> Config:
    raw: dict = {
        "model": {"path": f"x/{options.shape}", "random_weights": True}, "data": {"path": "none"},
    }  # fmt: skip
    for text in options.set:
        apply_override(raw, text)
    return parse_config(raw)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="Qwen3-0.6B", help="a folder of models/shapes")
    parser.add_argument("--workload", default="retool_64", help="the lengths to train on")
    parser.add_argument("--copies", type=int, default=1, help="the workload this many times")
    parser.add_argument("--rows", type=int, default=0, help="instead: equal sequences of --prompt and --response")
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--response", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=4, help="the first warms up and is not counted")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.FIELD=VALUE", help="other settings")
    parser.add_argument("--plain", action="store_true", help="the modules' own forwards instead of fused kernels")
    parser.add_argument("--profile", action="store_true", help="one more step, kernel by kernel")
    return parser.parse_args()


def measure(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Builds the policy, takes the steps and returns the figures of the JSON line. Collective."""
    config, world_size = settings(options), dist.get_world_size()
    policy = Policy(config, device)
    config, memory = plan_memory(config, policy.model.config, policy, kv_cache=0)
    scored, budget = scripted_records(script(options), VOCABULARY), config.micro_batch_tokens
    weights = token_weights(scored, "dapo", 1)
    batches = collate(scored, weights, budget, world_size, leave_out_equal=True)[dist.get_rank()]
    tokens = torch.tensor(sum(sum(batch.lengths) for batch in batches), device=device)
    dist.all_reduce(tokens)

    def step() -> OneUpdate:
        return update(policy, [batches], config.loss, 1e-6).updates[0]

    times, updates = [], []
    for _ in range(options.steps):
        torch.cuda.synchronize()
        started = time.perf_counter()
        updates.append(step())
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    if options.profile:
        table = time_table(*kernel_times(step))
        if dist.get_rank() == 0:
            print(table, flush=True)
    seconds, parameters = min(times[1:] or times), sum(p.numel() for p in policy.model.parameters())
    rate, flops = matrix_rate(device), 6 * parameters * int(tokens) / seconds / world_size
    return {
        "ranks": world_size, "tokens": int(tokens), "budget": budget, "micro_batches": len(batches),
        "seconds": round(seconds, 3), "all_seconds": [round(t, 3) for t in times],
        "tokens_per_second": round(int(tokens) / seconds), "tflops": round(flops / 1e12, 1),
        "share": round(flops / rate, 3), "matrix_tflops": round(rate / 1e12, 1),
        "peak_allocated_gb": round(peaks[0] / 1e9, 2), "peak_reserved_gb": round(peaks[1] / 1e9, 2),
        "forecast_gb": round(memory.device / 1e9, 2), "layers_kept": policy.recompute.kept,
        "losses": [u.loss for u in updates], "grad_norms": [round(u.grad_norm, 5) for u in updates],
    }  # fmt: skip


def main() -> None:
    options = parse()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    init_distributed(device)
    if options.plain:
        policy_module.can_fuse = lambda *_: False
    found = measure(options, device)
    if dist.get_rank() == 0:
        lengths = f"{options.rows} x ({options.prompt} + {options.response})" if options.rows else options.workload
        chosen = {"shape": options.shape, "lengths": lengths, "settings": options.set + ["plain"] * options.plain}
        print(json.dumps({"benchmark": "update", **chosen, **found, **describe(device)}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
