"""The kinds of steps that a rollout's time is told by."""

from __future__ import annotations

from benchmarks.step_times import kind_of


def test_steps_are_told_apart_by_sequences_and_by_rows_where_chunks_are_longer():
    assert kind_of([1]) == "sequences <= 1"
    assert kind_of([1] * 5) == "sequences <= 8"
    assert kind_of([1] * 30 + [40]) == "rows, longer chunks <= 128"
