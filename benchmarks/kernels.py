"""Device time of an action by kinds of kernels."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

Kernel = tuple[str, float, int]  # name, seconds, calls

# The first pattern that a kernel's name contains decides.
KINDS = (
    ("attention", r"flash|fmha|cudnn.*(sdpa|attention|fprop|bprop)"),
    ("products", r"gemm|nvjet|cutlass|cublas|xmma|splitK"),
    ("head", r"logprob_"),
    ("fused elementwise", r"norm_(for|back)ward|rotate_(for|back)ward|gate_(for|back)ward"),
    ("optimizer", r"multi_tensor|adam|Adam"),
    ("communication", r"nccl"),
    ("copies", r"[Mm]emcpy|[Mm]emset|CatArray|copy_kernel|direct_copy|bfloat16_copy|float_copy|FillFunctor"),
    ("embedding", r"embedding|index"),
    ("reductions", r"reduce"),
    ("elementwise", r"elementwise"),
)  # fmt: skip


def kernel_times(action: Callable[[], Any]) -> tuple[list[Kernel], float]:
    """Each kernel's device time in one run of `action`, and the wall seconds of that run."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        started = time.perf_counter()
        action()
        torch.cuda.synchronize()
        wall = time.perf_counter() - started
    found = [
        (event.key, event.self_device_time_total / 1e6, event.count)
        for event in profiler.key_averages()
        if event.self_device_time_total > 0
    ]
    return sorted(found, key=lambda kernel: -kernel[1]), wall


def kind_of(name: str) -> str:
    return next((kind for kind, pattern in KINDS if re.search(pattern, name)), "other")


def time_table(kernels: list[Kernel], wall: float, longest: int = 24) -> str:
    """Seconds by kind, then the longest kernels; idle is wall time without a kernel if none overlap."""
    kinds: dict[str, tuple[float, int]] = {}
    for name, seconds, calls in kernels:
        before = kinds.get(kind_of(name), (0.0, 0))
        kinds[kind_of(name)] = before[0] + seconds, before[1] + calls
    busy = sum(seconds for seconds, _ in kinds.values())
    lines = [f"{'kind':18} {'ms':>9} {'share':>6} {'calls':>7}"]
    for kind, (seconds, calls) in sorted(kinds.items(), key=lambda item: -item[1][0]):
        lines.append(f"{kind:18} {1e3 * seconds:9.1f} {seconds / wall:6.1%} {calls:7}")
    lines.append(f"{'idle':18} {1e3 * (wall - busy):9.1f} {(wall - busy) / wall:6.1%}")
    lines.append("longest:")
    lines += [f"{1e3 * seconds:9.1f} ms {calls:6} {name[:120]}" for name, seconds, calls in kernels[:longest]]
    return "\n".join(lines)
