"""A rollout's time is told by the kinds of its steps."""

from __future__ import annotations

from types import SimpleNamespace

from benchmarks.step_times import StepTimes, kind_of


def test_steps_are_told_apart_by_sequences_and_by_rows_where_chunks_are_longer():
    assert kind_of([1]) == (False, 1)
    assert kind_of([1] * 5) == (False, 8)
    assert kind_of([1] * 30 + [40]) == (True, 128)


def test_a_step_lasts_until_the_next_one_starts_and_the_last_until_the_table():
    clock = iter([10.0, 14.0, 15.0, 25.0])

    class Mark:
        def __init__(self):
            self.now = next(clock)

        def elapsed_time(self, other):
            return other.now - self.now

        def synchronize(self):
            pass

    decoder = SimpleNamespace(submit=lambda chunks, temperature: len(chunks))
    times = StepTimes(decoder, Mark)
    chunk, longer = SimpleNamespace(token_ids=[1]), SimpleNamespace(token_ids=[1, 2])
    assert [decoder.submit(chunks, 1.0) for chunks in ([chunk], [longer, chunk], [chunk])] == [1, 2, 1]
    assert [line.split() for line in times.table().splitlines()] == [
        ["sequences", "<=", "1", "2", "x", "7.000", "ms", "=", "0.01", "s"],
        ["rows,", "longer", "chunks", "<=", "4", "1", "x", "1.000", "ms", "=", "0.00", "s"],
    ]
