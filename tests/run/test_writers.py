"""Each step stands once in the metrics; trajectories are bounded; console and trackers hear of each step."""

from __future__ import annotations

import json

from run.trajectories import stored_steps
from run.writers import RunWriter
from tests.support.builders import record, scored


class Listener:
    """A console and a tracker that remember."""

    def __init__(self):
        self.heard = []

    def step(self, row):
        self.heard.append(("step", row["step"]))

    def log(self, row):
        self.heard.append(("log", row["step"]))

    def rewind(self, step):
        self.heard.append(("rewind", step))

    def close(self):
        self.heard.append(("close",))


def writer(run_dir, keep=None, listener=None) -> RunWriter:
    listener = listener or Listener()
    return RunWriter(run_dir, keep, listener, [listener])


def write(to: RunWriter, step: int, count: int = 1) -> None:
    records = [record("PA", sample=i) for i in range(count)]
    to.metrics({"step": step})
    to.trajectories(step, records, scored(records, [1.0] * count), ["7"])


def steps(run_dir) -> list[int]:
    return [json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_rewinding_removes_what_came_after_the_checkpoint(tmp_path):
    for step in (1, 2, 10):
        write(writer(tmp_path), step)
    resumed = writer(tmp_path)
    resumed.rewind(2)
    assert steps(tmp_path) == stored_steps(tmp_path) == [1, 2]
    write(resumed, 3)
    assert steps(tmp_path) == stored_steps(tmp_path) == [1, 2, 3]


def test_the_newest_whole_steps_stay_within_the_bound(tmp_path):
    bounded = writer(tmp_path, keep=10)
    for step in range(1, 6):
        write(bounded, step, count=4)
    assert stored_steps(tmp_path) == [4, 5]
    assert steps(tmp_path) == [1, 2, 3, 4, 5]


def test_the_bound_counts_what_an_earlier_session_wrote(tmp_path):
    write(writer(tmp_path), 1, count=4)
    write(writer(tmp_path), 2, count=4)
    write(writer(tmp_path, keep=8), 3, count=4)
    assert stored_steps(tmp_path) == [2, 3]


def test_the_newest_step_stays_even_where_it_alone_exceeds_the_bound(tmp_path):
    small = writer(tmp_path, keep=2)
    write(small, 1, count=4)
    write(small, 2, count=4)
    assert stored_steps(tmp_path) == [2]


def test_console_and_trackers_hear_each_step_and_a_rewind(tmp_path):
    listener = Listener()
    one = writer(tmp_path, listener=listener)
    one.metrics({"step": 1})
    one.rewind(0)
    one.close()
    assert listener.heard == [("step", 1), ("log", 1), ("rewind", 0), ("close",)]


def test_rewinding_drops_a_last_line_that_was_cut_in_writing(tmp_path):
    before = writer(tmp_path)
    for step in (1, 2):
        write(before, step)
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 3, "rew')
    writer(tmp_path).rewind(2)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]
