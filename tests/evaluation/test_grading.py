"""Grades from the user's function: in order, begun while others are sampled, and never made of a failure."""

from __future__ import annotations

import dataclasses
from concurrent.futures import Future

import pytest

from data import Problem
from evaluation.grading import RewardError, UserGrader, as_trajectory, failures
from reward import Grade, Reason
from rollout.records import StopReason
from sandbox.workers.rewards import Outcome
from tests.support.builders import record

TEXT = "<think>so</think>it is 7"


class Scorer:
    """Gives the row's reward, and remembers what it was shown."""

    def __init__(self):
        self.shown = []

    def score(self, trajectory, problem):
        self.shown.append((trajectory, problem))
        future = Future()
        future.set_result(
            Outcome(problem["reward"], "mine", True) if "reward" in problem else Outcome(error="KeyError")
        )
        return future


def graded(records, rows, begin=()):
    scorer = Scorer()
    grader = UserGrader(scorer, lambda ids: TEXT)
    grader.expect([Problem("p", "", i, row=row) for i, row in enumerate(rows)])
    for one in begin:
        grader.begin(one)
    return grader.grades(records), scorer.shown


def test_every_record_is_graded_once_by_its_own_row():
    records = [record("PA", prompt=1), record("PA", prompt=0), record("PA", prompt=0, sample=1)]
    grades, shown = graded(records, [{"reward": 0.5}, {"reward": -2.0}], begin=records[1:2])
    assert [grade.reward for grade in grades] == [-2.0, 0.5, 0.5]
    assert len(shown) == 3


def test_a_trajectory_that_the_sandbox_spoilt_is_not_shown():
    spoilt = dataclasses.replace(record("PA"), stop=StopReason.TOOL_INFRA)
    grades, shown = graded([spoilt], [{"reward": 1.0}])
    assert grades == [Grade(False, Reason.TOOL_INFRA)] and not grades[0].is_trained and not shown


def test_the_final_text_leaves_thinking_out_and_the_turns_keep_it():
    view = as_trajectory(record("PAAOA"), lambda ids: TEXT)
    assert view["final_text"] == "it is 7"
    assert [turn["text"] for turn in view["turns"]] == [TEXT, TEXT]
    assert (view["stop"], view["sampled_tokens"]) == ("answered", 3)


def test_failures_are_counted_and_the_first_is_shown_with_its_trajectory():
    records = [record("PA", prompt=i) for i in range(100)]
    grades = [Grade(True, "x", 1.0)] * 99 + [Grade(False, "", 0.0, "KeyError", "KeyError: 'x'")]
    counts, first = failures(records, grades, lambda ids: TEXT, 4)
    assert counts == {"KeyError": 1}
    assert "step 4, prompt 99, sample 0: KeyError: 'x'" in first and TEXT in first
    assert failures(records[:99], grades[:99], lambda ids: TEXT, 4) == ({}, "")


def test_more_than_one_per_cent_of_failures_is_one_line():
    failed = Grade(False, "", 0.0, "KeyError", "KeyError: 'x'")
    grades = [failed, *[Grade(True, "x", 1.0)] * 97, failed]
    with pytest.raises(RewardError, match=r"2 of 99 trajectories.*more than 1%; fix") as error:
        failures([record("PA", prompt=i) for i in range(99)], grades, lambda ids: TEXT, 1)
    assert "\n" not in str(error.value)
