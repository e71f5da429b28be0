"""Evaluation figures over problems, not over samples."""

from __future__ import annotations

import dataclasses
import math

from evaluation import summarize
from reward import Grade, Reason
from rollout.records import StopReason
from tests.builders import record


def figures(outcomes: list[list[bool]], stop=StopReason.ANSWERED):
    records, grades = [], []
    for prompt, samples in enumerate(outcomes):
        for sample, right in enumerate(samples):
            records.append(dataclasses.replace(record("PA", prompt=prompt, sample=sample), stop=stop))
            grades.append(Grade(right, Reason.CORRECT if right else Reason.NO_BOX))
    return summarize(records, grades)


def test_mean_pass_and_standard_error():
    got = figures([[True, False], [False, False], [True, True], [True, False]])
    assert (got["problems"], got["k"]) == (4, 2)
    assert got["avg_at_k"] == 0.5
    assert got["pass_at_k"] == 0.75
    assert math.isclose(got["avg_stderr"], math.sqrt((0 + 0.25 + 0.25 + 0) / 3 / 4))


def test_cut_trajectories_are_shown_beside_the_score():
    got = figures([[False, False]], stop=StopReason.TURN_TOKENS)
    assert (got["avg_at_k"], got["cut"]) == (0.0, 1.0)
