"""The teacher's pass and the update that learns from it, at true shapes with random weights, on one CUDA GPU.

    python benchmarks/bench_distill.py [--teacher Qwen3-4B-Instruct-2507] [--student Qwen3-0.6B] [--workload retool_64]
        [--divergences reverse_kl sampled] [--set teacher.placement=gpu ...]

Trajectories have the lengths of a scripted workload and random ids. Share of the teacher phase: 2 x its parameters
without embedding and head x tokens, over seconds x the measured rate of a bf16 product; copying its weights to the GPU
and its hidden states to the host count as waste. `policy` among the divergences is the same update by GRPO, for scale.
Sampling is not timed here: a student samples as any policy does (`bench_rollout.py`). A table, then one JSON line.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.bench_update import VOCABULARY, scripted_records
from benchmarks.machine import describe, matrix_rate
from benchmarks.workload import load_workload
from config import Config, parse_config
from configs.schema import apply_override
from policy import Policy, init_distributed
from startup.building import build_teacher
from update.minibatch import plan_updates
from update.update import update


def settings(options: argparse.Namespace) -> Config:
    raw: dict = {
        "model": {"path": f"x/{options.student}", "random_weights": True}, "data": {"path": "none"},
        "train": {"max_tokens_per_micro_batch": options.tokens}, "loss": {"distill_weight": 1.0},
        "teacher": {"path": f"x/{options.teacher}"},
    }  # fmt: skip
    for text in options.set:
        apply_override(raw, text)
    return parse_config(raw)


def timed(action: Callable[[], Any]) -> tuple[float, float, Any]:
    """Seconds, peak of allocated GB, and what `action` returns."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    result = action()
    torch.cuda.synchronize()
    return time.perf_counter() - started, torch.cuda.max_memory_allocated() / 1e9, result


def measure(config: Config, policy: Policy, teacher: Any, batches: Any, kind: str, steps: int) -> dict[str, Any]:
    """The fastest of `steps` steps, after one that warms up."""
    loss = config.loss
    teacher.measure = dataclasses.replace(teacher.measure, kind=kind)
    if kind == "policy":
        loss = dataclasses.replace(loss, distill_weight=0.0)
    phases: list[dict[str, Any]] = []
    for _ in range(steps + 1):
        lessons, taught = None, (0.0, 0.0)
        if kind != "policy":
            *taught, lessons = timed(lambda: teacher.lessons([batches], ()))
        *trained, stats = timed(lambda lessons=lessons: update(policy, [batches], loss, 1e-6, lessons))
        phases.append({
            "divergence": kind, "teacher_seconds": taught[0], "update_seconds": trained[0],
            "teacher_peak_gb": taught[1], "update_peak_gb": trained[1], "loss": stats.updates[0].loss,
            "cached_mb": sum(getattr(lesson, "hidden", torch.empty(0)).nbytes for lesson in lessons[0]) / 1e6
            if lessons else 0.0,
        })  # fmt: skip
    return min(phases[1:], key=lambda row: row["teacher_seconds"] + row["update_seconds"])


def inner_parameters(model: Any) -> int:
    """Parameters that a forward to the last hidden state multiplies with."""
    matrices = {id(m.weight): m.weight for m in (model.get_input_embeddings(), model.get_output_embeddings())}
    return sum(p.numel() for p in model.parameters()) - sum(weight.numel() for weight in matrices.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", default="Qwen3-4B-Instruct-2507", help="a folder of models/shapes")
    parser.add_argument("--student", default="Qwen3-0.6B", help="likewise")
    parser.add_argument("--workload", default="retool_64")
    parser.add_argument("--tokens", type=int, default=16384, help="train.max_tokens_per_micro_batch")
    parser.add_argument("--steps", type=int, default=2, help="timed, after one that warms up")
    parser.add_argument("--divergences", nargs="+", default=["policy", "sampled", "forward_kl", "reverse_kl", "jsd"])
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.FIELD=VALUE")
    options = parser.parse_args()
    device = torch.device("cuda")
    init_distributed(device)
    rate = matrix_rate(device)
    config = settings(options)
    policy = Policy(config, device)
    teacher = build_teacher(config, policy, device)
    [[batches]] = plan_updates(scripted_records(load_workload(options.workload, 1)[0], VOCABULARY), config, 1)
    tokens = sum(sum(batch.lengths) for batch in batches)
    flops = 2 * inner_parameters(teacher.model) * tokens
    sampled = sum(len(batch.targets) for batch in batches)
    print(f"{tokens} tokens, {sampled} of them sampled, {len(batches)} micro-batches")
    rows = []
    for kind in options.divergences:
        row = measure(config, policy, teacher, batches, kind, options.steps)
        row["teacher_share"] = flops / row["teacher_seconds"] / rate if row["teacher_seconds"] else 0.0
        rows.append(row)
        print(" ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()), flush=True)
    print(json.dumps({
        "benchmark": "distill", "teacher": options.teacher, "student": options.student, "workload": options.workload,
        "tokens": tokens, "sampled": sampled,
        "micro_batch_tokens": options.tokens, "set": options.set, "matrix_tflops": round(rate / 1e12, 1), "rows": rows,
        **describe(device),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
