"""A scripted workload that is not well formed is refused in one line, never waited on."""

from __future__ import annotations

import copy
import json
import subprocess
import sys

import pytest

from benchmarks.workload import WorkloadError, length_of, load_workload
from tests.support.launch import ROOT

TOOL_TURN = {"new_tokens": 5, "tool_tokens": 3, "tool_seconds": 0.1}
GOOD = {
    "meta": {"prompts": 1, "samples_per_prompt": 2},
    "trajectories": [
        {"prompt": 0, "sample": 0, "prompt_tokens": 7, "turns": [TOOL_TURN, {"new_tokens": 4}]},
        {"prompt": 0, "sample": 1, "prompt_tokens": 7, "turns": [{"new_tokens": 2}]},
    ],
}


def written(folder, data) -> str:
    path = folder / "work.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return str(path)


def changed(path: list, value: object):
    """GOOD with one value replaced; the value `...` removes the key."""
    data = copy.deepcopy(GOOD)
    inner = data
    for key in path[:-1]:
        inner = inner[key]
    if value is ...:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return data


def test_shipped_workloads_are_well_formed_and_fit_the_context():
    for name, count in (("retool_64", 64), ("retool_256", 256)):
        rows, samples = load_workload(name, context=8192)
        assert len(rows) == count and samples == 8


def test_a_file_elsewhere_is_read_by_its_path(tmp_path):
    rows, samples = load_workload(written(tmp_path, GOOD), copies=2)
    assert samples == 2 and [length_of(row) for row in rows] == [19, 9, 19, 9]
    assert [row["prompt"] for row in rows] == [0, 0, 1, 1]


FIRST = ["trajectories", 0]
BAD = [
    (["meta"], ..., "meta"),
    (["meta", "prompts"], ..., "meta.prompts"),
    (["meta", "samples_per_prompt"], "2", "meta.samples_per_prompt"),
    (["trajectories"], [], "trajectories"),
    (["trajectories"], {}, "trajectories"),
    ([*FIRST], [1], "trajectories[0]"),
    ([*FIRST, "prompt"], ..., "trajectories[0].prompt"),
    ([*FIRST, "sample"], -1, "trajectories[0].sample"),
    ([*FIRST, "sample"], 1, "trajectories"),
    ([*FIRST, "prompt_tokens"], 0, "trajectories[0].prompt_tokens"),
    ([*FIRST, "prompt_tokens"], 8, "prompt 0 sample 1 prompt_tokens"),
    ([*FIRST, "turns"], [], "trajectories[0].turns"),
    ([*FIRST, "turns", 0], 5, "trajectories[0].turns[0]"),
    ([*FIRST, "turns", 0, "new_tokens"], ..., "trajectories[0].turns[0].new_tokens"),
    ([*FIRST, "turns", 0, "new_tokens"], 0, "trajectories[0].turns[0].new_tokens"),
    ([*FIRST, "turns", 0, "new_tokens"], 2.5, "trajectories[0].turns[0].new_tokens"),
    ([*FIRST, "turns", 0, "new_tokens"], True, "trajectories[0].turns[0].new_tokens"),
    ([*FIRST, "turns", 0, "tool_tokens"], ..., "trajectories[0].turns[0].tool_tokens"),
    ([*FIRST, "turns", 0, "tool_tokens"], -3, "trajectories[0].turns[0].tool_tokens"),
    ([*FIRST, "turns", 0, "tool_seconds"], ..., "trajectories[0].turns[0].tool_seconds"),
    ([*FIRST, "turns", 0, "tool_seconds"], -0.1, "trajectories[0].turns[0].tool_seconds"),
    ([*FIRST, "turns", 0, "tool_seconds"], float("nan"), "trajectories[0].turns[0].tool_seconds"),
    ([*FIRST, "turns", 0, "tool_seconds"], "0.1", "trajectories[0].turns[0].tool_seconds"),
    ([*FIRST, "turns", 0, "latency"], 1, "trajectories[0].turns[0]"),
    ([*FIRST, "turns", 1, "tool_tokens"], 0, "trajectories[0].turns[1]"),
]


@pytest.mark.parametrize(("path", "value", "field"), BAD, ids=lambda value: str(value).replace(" ", ""))
def test_what_is_not_well_formed_is_named_in_one_line(tmp_path, path, value, field):
    with pytest.raises(WorkloadError) as caught:
        load_workload(written(tmp_path, changed(path, value)))
    assert str(caught.value).startswith(f"error: workload {field} is ") and "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "[1, 2]", "{"])
def test_a_file_that_holds_no_workload_is_refused(tmp_path, text):
    with pytest.raises(WorkloadError, match=r"error: workload (file|meta) is"):
        load_workload(written(tmp_path, text))


def test_turns_beyond_the_context_are_refused(tmp_path):
    name = written(tmp_path, GOOD)
    assert load_workload(name, context=19)[1] == 2
    with pytest.raises(WorkloadError, match="prompt 0 sample 0 length is 19: the context holds 18 tokens"):
        load_workload(name, context=18)


@pytest.mark.parametrize("words", [{"copies": 0}, {"shrink": 0}, {"shrink": -1}])
def test_copies_and_shrink_are_at_least_one(words):
    [[field, value]] = words.items()
    with pytest.raises(WorkloadError, match=f"error: workload {field} is {value}: use at least 1"):
        load_workload("retool_64", **words)


def test_a_benchmark_ends_with_that_line(tmp_path):
    name = written(tmp_path, changed([*FIRST, "turns", 0, "tool_seconds"], ...))
    done = subprocess.run(
        [sys.executable, "benchmarks/bench_engine.py", "--workload", name],
        cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (1, "")
    [line] = done.stderr.splitlines()[-1:]
    assert (
        line == ("error: workload trajectories[0].turns[0].tool_seconds is None: give a latency of 0 s or more")
        and "Traceback" not in done.stderr
    )
