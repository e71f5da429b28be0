"""The memory and time lines: numbers as people say them, and no two of them that seem to contradict each other."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from startup import check
from startup.forecast import Memory

CPU = torch.device("cpu")
HELD = Memory(
    weights=1 << 33, gradients=10**9, optimizer=2 * 10**9, kv_cache=1 << 33, update=10**9, kept_layers=1, layers=1,
    optimizer_on_host=False,
)  # fmt: skip


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.01234, "0.0123 s"), (119.4, "119 s"), (120, "2 minutes"), (1030, "17 minutes"), (7199, "120 minutes"),
        (7200, "2.0 hours"), (1e7, "2,777.8 hours"),
    ],
)  # fmt: skip
def test_times_are_said_in_the_unit_that_people_would_take(seconds, words):
    assert check.spoken(seconds) == words


def test_less_free_than_the_whole_is_fine_where_the_rest_is_taken_already(monkeypatch):
    monkeypatch.setattr(check, "_free_host_bytes", lambda: 5 * 10**9)
    line = check.check_memory(HELD, 8192, CPU)
    assert HELD.device > 5e9 and line.state == "ok"
    assert line.text.endswith("at most 4.00 GB are still to come, the rest is taken already; 5.0 GB free now")


def test_more_to_come_than_is_free_is_noted_with_the_mend(monkeypatch):
    monkeypatch.setattr(check, "_free_host_bytes", lambda: 3 * 10**9)
    line = check.check_memory(HELD, 8192, CPU)
    assert line.state == "note"  # on the CPU; nothing can be moved off it
    assert line.text.endswith("3.0 GB free now: lower rollout.kv_tokens or train.max_tokens_per_micro_batch")
    cheaper = dataclasses.replace(HELD, optimizer=10**9)
    assert check.check_memory(cheaper, 8192, CPU).state == "ok"  # 3 GB to come
