"""What a step will take: the memory and time lines of the check.

Left out: anything measured; memory is the forecast beside what the system says is free, time is scaled from the probe.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch

from rollout.records import RolloutRecord
from startup.forecast import GIGABYTE, Memory
from startup.parts import Parts

LONGEST_IN_SECONDS, LONGEST_IN_MINUTES = 120, 7200  # seconds


def memory(forecast: Memory, tokens: int, device: torch.device) -> tuple[Literal["ok", "note"], str]:
    """What is still to come (gradients, moments, one micro-batch) against what is free now."""
    cuda = device.type == "cuda"
    free = torch.cuda.mem_get_info(device)[0] if cuda else _free_host_bytes()
    coming = forecast.to_come + (0 if forecast.optimizer_on_host and cuda else forecast.optimizer)
    text = (
        f"{forecast}; micro-batches of up to {tokens} tokens; at most {coming / GIGABYTE:.2f} "
        f"GB are still to come, the rest is taken already; {free / GIGABYTE:.1f} GB free now"
    )
    if coming > free:
        cache = "rollout.kv_memory_fraction" if cuda else "rollout.kv_tokens"
        elsewhere = ", or set train.offload_optimizer" if cuda else ""
        return "note", f"{text}: lower {cache} or train.max_tokens_per_micro_batch{elsewhere}"
    return "ok", text


def _free_host_bytes() -> int:
    words = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(words["MemAvailable"].split()[0]) * 1024


def time(
    parts: Parts, records: Sequence[RolloutRecord], rollout_seconds: float, forward_seconds: float
) -> str:  # fmt: skip
    """From the probe: its decode steps are as many as its longest trajectory has sampled tokens."""
    rollout = parts.config.rollout
    decode = rollout_seconds / max(record.num_sampled for record in records)
    rate = sum(len(record.token_ids) for record in records) / forward_seconds
    passes = 4 - parts.memory.kept_layers / parts.memory.layers  # forward, twice that back, and some forward again
    waves = -(-rollout.trajectories_per_step // (rollout.decode_rows * parts.world_size))
    length = statistics.median(map(len, parts.data.prompts)) + rollout.max_new_tokens
    sampling = waves * rollout.max_new_tokens * decode
    update = rollout.trajectories_per_step / parts.world_size * length * passes / rate
    return (
        f"a decode step {1000 * decode:.1f} ms, a forward {rate:.0f} tokens/s on {len(records)} rows; if every "
        f"trajectory samples {rollout.max_new_tokens} tokens, a step takes about {spoken(sampling)} of sampling and "
        f"{spoken(update)} of update, more for full rows"
    )


def spoken(seconds: float) -> str:
    """In the unit that people would say it in."""
    if seconds < LONGEST_IN_SECONDS:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.0f} minutes" if seconds < LONGEST_IN_MINUTES else f"{seconds / 3600:,.1f} hours"
