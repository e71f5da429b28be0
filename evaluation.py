"""Scores of the policy on problems it does not train on: mean over samples, pass@k, and why answers were wrong.

Left out here: confidence intervals and comparisons between tools on and off (`main.py evaluate`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from reward import Grade
from rollout.records import RolloutRecord, StopReason

# Evaluation draws from other noise than training, also for the same prompt index and step.
SEED_OFFSET = 1 << 32


def summarize(records: Sequence[RolloutRecord], grades: Sequence[Grade]) -> dict[str, float]:
    """Figures over problems; `records` of one problem share a prompt_index, k samples each.

    avg_at_k: mean correctness. avg_stderr: its standard error over problems. pass_at_k: share of problems with a right
    sample (k = all samples, so the unbiased estimator of Chen et al. 2021 is this share). cut: share of trajectories
    that ran out of turns, tokens or context. A trajectory that the sandbox spoilt counts as wrong and in `infra`.
    """
    by_problem: dict[int, list[bool]] = {}
    for record, verdict in zip(records, grades, strict=True):
        by_problem.setdefault(record.prompt_index, []).append(verdict.correct)
    means = [sum(samples) / len(samples) for samples in by_problem.values()]
    mean = sum(means) / len(means)
    variance = sum((m - mean) ** 2 for m in means) / max(len(means) - 1, 1)
    cut = {StopReason.TURN_LIMIT, StopReason.TURN_TOKENS, StopReason.CONTEXT_FULL}
    return {
        "problems": len(means),
        "k": max(map(len, by_problem.values())),
        "avg_at_k": mean,
        "avg_stderr": math.sqrt(variance / len(means)),
        "pass_at_k": sum(any(samples) for samples in by_problem.values()) / len(means),
        "cut": sum(r.stop in cut for r in records) / len(records),
        "infra": sum(r.stop is StopReason.TOOL_INFRA for r in records) / len(records),
    }
