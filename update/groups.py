"""A step's groups: which have something to compare, and what the step has sampled over its rounds.

Pure functions over `Scored`, in the given order. A group is all samples of one prompt; its rewards are equal exactly
where all its advantages are 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rollout.records import RolloutRecord, Scored, StopReason

MAX_REASONS = 40  # distinct ones of a step in its metrics: a user's reward may write anything


def by_prompt(scored: Sequence[Scored]) -> dict[int, list[Scored]]:
    """Groups by prompt_index, in order of first appearance."""
    groups: dict[int, list[Scored]] = {}
    for s in scored:
        groups.setdefault(s.record.prompt_index, []).append(s)
    return groups


def is_equal(group: Sequence[Scored]) -> bool:
    """Whether a group has nothing to compare: equal rewards, or one sample left."""
    return not any(s.advantage for s in group)


def equal_share(scored: Sequence[Scored]) -> float:
    groups = by_prompt(scored).values()
    return sum(map(is_equal, groups)) / max(len(groups), 1)


def count_reasons(
    records: Sequence[RolloutRecord], scored: Sequence[Scored], reward_errors: int = 0
) -> dict[str, int]:
    """The ledger of a step: every trajectory once, also those without a score because sandbox or reward failed."""
    counts = Counter(s.reason for s in scored)
    counts += Counter(reward_error=reward_errors)  # `+` leaves out zeros
    counts += Counter(str(r.stop) for r in records if r.stop is StopReason.TOOL_INFRA)
    common = counts.most_common()
    rest = {"(others)": sum(count for _, count in common[MAX_REASONS:])} if len(common) > MAX_REASONS else {}
    return dict(common[:MAX_REASONS] if rest else counts) | rest


def without_equal_groups(scored: Sequence[Scored]) -> list[Scored]:
    return [s for group in by_prompt(scored).values() if not is_equal(group) for s in group]


WALL_TIMES = ("seconds", "submit_seconds", "read_seconds", "idle_seconds", "tools_open_seconds")


def over_ranks(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The figures of one rollout (`rollout.stats`) from those of each rank: counts add up, wall times are averaged."""
    sums = {name: sum(part[name] for part in parts) for name in parts[0]}
    return sums | {name: sums[name] / len(parts) for name in WALL_TIMES}


@dataclass(slots=True)
class SampledStep:
    """What a step has sampled so far; prompt_index counts through all rounds."""

    indices: list[int] = field(default_factory=list)  # the problem of each prompt_index
    records: list[RolloutRecord] = field(default_factory=list)
    scored: list[Scored] = field(default_factory=list)
    trained: list[Scored] = field(default_factory=list)  # with refills, only those of groups with a spread
    reward_errors: Counter[str] = field(default_factory=Counter)  # failures of reward.function by exception
    rollout_stats: dict[str, Any] = field(default_factory=dict)  # summed over the rounds
    rounds: int = 0

    def add(
        self, records: list[RolloutRecord], scored: list[Scored], trained: list[Scored], stats: dict[str, Any]
    ) -> None:
        """One round. stats: figures of its rollout, which add up over rounds."""
        self.rounds += 1
        self.records += records
        self.scored += scored
        self.trained += trained
        self.rollout_stats = {name: value + self.rollout_stats.get(name, 0) for name, value in stats.items()}

    def rollout_row(self) -> dict[str, Any]:
        """The rollout's figures for the metrics line, with the rates that follow from them."""
        s = self.rollout_stats
        rates = {
            "prefill_tokens_per_second": s["prefill_tokens"] / max(s["seconds"], 1e-9),
            "decode_tokens_per_second": s["decode_tokens"] / max(s["seconds"], 1e-9),
            "occupancy": s["running_rows"] / max(s["row_slots"], 1),
            "tools_running": s["tool_seconds"] / max(s["seconds"], 1e-9),
            # Of the time in which a tool ran, the share in which other trajectories decoded.
            "tools_hidden": 1 - s["idle_seconds"] / max(s["tools_open_seconds"], s["idle_seconds"], 1e-9),
        }
        return {f"rollout_{name}": value for name, value in (s | rates).items()}
