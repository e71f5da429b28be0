"""The machine, commit and versions of a benchmark, and the machine's measured ceilings."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import torch
import transformers


def describe(device: torch.device) -> dict[str, Any]:
    """Commit, device and versions, for the JSON line that ends every benchmark."""
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True
    )
    return {
        "commit": done.stdout.strip() or "unknown",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def read_bandwidth(device: torch.device) -> float:
    """Bytes read per second by a large reduction; on a CPU a constant of 10 GB/s."""
    if device.type != "cuda":
        return 1e10
    data = torch.ones(1 << 31, dtype=torch.int8, device=device).view(torch.int64)
    return data.nbytes / _seconds(lambda: data.sum())


def matrix_rate(device: torch.device, size: int = 8192) -> float:
    """Floating-point operations per second of a large bf16 product on random data."""
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / _seconds(lambda: a @ b)


def _seconds(action: Any, repeats: int = 10) -> float:
    """Median device time of `action`."""
    for _ in range(3):
        action()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        action()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return sorted(times)[len(times) // 2]
