"""One optimizer step under ZeRO-2 at a true shape with random weights, on trajectories of a scripted workload.

    python benchmarks/bench_update.py --shape Qwen3-0.6B [--workload retool_64] [--tokens 16384] [--steps 4]

Share: 6 x parameters x trained-row tokens per second over the measured rate of a bf16 product; recomputation and
padding count as waste. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.bench_rollout import load_workload
from benchmarks.machine import describe, matrix_rate
from config import parse_config
from data import collate
from policy import Policy, init_distributed
from rollout.records import RolloutRecord, Scored, StopReason, Turn
from update import update


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="Qwen3-0.6B")
    parser.add_argument("--workload", default="retool_64")
    parser.add_argument("--tokens", type=int, default=16384, help="train.max_tokens_per_micro_batch")
    parser.add_argument("--steps", type=int, default=4, help="the first warms up and is left out")
    parser.add_argument("--offload", action="store_true", help="train.offload_optimizer")
    options = parser.parse_args()
    device = torch.device("cuda")
    init_distributed(device)
    config = parse_config({
        "model": {"path": f"x/{options.shape}", "random_weights": True}, "data": {"path": "none"},
        "train": {"max_tokens_per_micro_batch": options.tokens, "offload_optimizer": options.offload},
    })  # fmt: skip
    policy = Policy(config, device)
    rows, _ = load_workload(options.workload, 1)
    batches = collate(scripted_records(rows, 1000), "dapo", options.tokens, 1)[0]
    tokens = sum(sum(batch.lengths) for batch in batches)
    times = []
    for _ in range(options.steps):
        torch.cuda.synchronize()
        started = time.perf_counter()
        stats = update(policy, batches, config.loss, 1e-6)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    seconds = min(times[1:])
    parameters = sum(p.numel() for p in policy.model.parameters())
    rate = matrix_rate(device)
    print(json.dumps({
        "benchmark": "update", "shape": options.shape, "workload": options.workload, "tokens": tokens,
        "micro_batches": len(batches),  "seconds": round(seconds, 3), "all_seconds": [round(t, 3) for t in times],
        "tokens_per_second": round(tokens / seconds), "tflops": round(6 * parameters * tokens / seconds / 1e12, 1),
        "share": round(6 * parameters * tokens / seconds / rate, 3), "matrix_tflops": round(rate / 1e12, 1),
        "peak_allocated_gb": round(torch.cuda.max_memory_allocated() / 1e9, 2),
        "peak_reserved_gb": round(torch.cuda.max_memory_reserved() / 1e9, 2), "grad_norm": stats.grad_norm,
        **describe(device),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
