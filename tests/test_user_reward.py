"""`reward.function` through main.py: one file and one word of config train, resume, evaluate, audit and report."""

from __future__ import annotations

import json

import pytest

import main as program
from run.trajectories import read_step, step_path
from tests.support.launch import ROOT, error_of, finished_run, metrics, run

pytestmark = pytest.mark.usefixtures("in_the_repository")

FILE = """
def score(trajectory, problem):
    calls = [call for turn in trajectory.turns for call in turn.calls]
    if problem["extra"] == "raises":
        raise ValueError("no such page")
    right = f"boxed{{{problem['truth']}}}" in trajectory.final_text
    return (2.0 - 0.5 * len(calls), "found") if right else (0.1 * len(calls), "lost", False)
"""
ROWS = [json.loads(line) for line in (ROOT / "models/tiny_qwen3/problems_heldout.jsonl").read_text().splitlines()[:8]]


def task(folder, **extra):
    """Settings of a task in `folder`."""
    folder.mkdir(exist_ok=True)
    (folder / "mine.py").write_text(FILE)
    rows = [{"prompt": row["prompt"], "truth": row["answer"], "extra": 0.25} | extra for row in ROWS]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"data.path={folder}/rows.jsonl", f"reward.function={folder}/mine.py:score", "train.num_threads=1"


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("task")
    settings = task(folder)
    return folder, settings, finished_run(folder / "run", *settings)


def test_a_step_trains_on_what_the_function_says_and_keeps_it(finished):
    _, _, run_dir = finished
    row, stored = metrics(run_dir)[0], read_step(run_dir, 1)
    assert row["reward"] == pytest.approx(sum(one["reward"] for one in stored) / 16)
    assert row["correct"] == sum(one["correct"] for one in stored) / 16
    assert row["reasons"].keys() <= {"found", "lost"} and sum(row["reasons"].values()) == 16
    assert row["reward_errors"] == {}
    assert any(one["reward"] > 0 and not one["correct"] for one in stored)
    assert stored[0]["problem"].keys() == {"prompt", "truth", "extra"}


def test_the_audit_calls_the_function_again_and_says_so(finished, capsys):
    folder, _, run_dir = finished
    assert program.main(["audit", str(run_dir), "--no-tools"]) == 0
    assert "64 rewards by calling reward.function again" in capsys.readouterr().out
    kept = (folder / "mine.py").read_text()
    try:
        (folder / "mine.py").write_text(kept.replace('"lost"', '"gone"'))
        assert program.main(["audit", str(run_dir), "--no-tools"]) == 1
        said = capsys.readouterr().out
        assert "has changed since the run" in said and "'lost', False), reward.function gives" in said
        (folder / "mine.py").unlink()  # the run's own copy serves
        assert program.main(["audit", str(run_dir), "--no-tools"]) == 0
    finally:
        (folder / "mine.py").write_text(kept)


def test_changed_code_is_resumed_only_where_that_is_asked_for(finished, capsys):
    folder, settings, run_dir = finished
    kept = (folder / "mine.py").read_text()
    try:
        (folder / "mine.py").write_text(kept + "\n")
        assert run(run_dir, *settings, "train.steps=5", resume=True) == 2
        assert "has changed since the run began" in capsys.readouterr().err
        assert len(metrics(run_dir)) == 4 and (run_dir / "code/mine.py").read_text() == kept
        assert run(run_dir, *settings, "train.steps=5", "tool.accept_changed_code=true", resume=True) == 0
        assert len(metrics(run_dir)) == 5 and (run_dir / "code/mine.py").read_text() == kept + "\n"
    finally:
        (folder / "mine.py").write_text(kept)


def test_evaluation_scores_by_the_function(finished, capsys):
    folder, _, run_dir = finished
    words = ["--run-dir", str(run_dir), "--tools", "on", "--set", f"eval.path={folder}/rows.jsonl"]
    assert program.main(["evaluate", *words, "--out", str(folder / "found.json")]) == 0
    assert "mean reward of reward.function" in capsys.readouterr().out
    scores = json.loads((folder / "found.json").read_text())["scores"]["on"]
    assert scores["reasons"].keys() <= {"found", "lost"} and "reward" in scores


def test_a_function_that_fails_ends_the_run_with_one_line_and_trains_nothing(tmp_path, capsys):
    assert run(tmp_path / "run", *task(tmp_path, extra="raises"), "train.check=false") == 2
    said = capsys.readouterr().err
    assert "ValueError: no such page; its final turn:" in said and said.count("\n") == 1
    assert not step_path(tmp_path / "run", 1).exists()


@pytest.mark.parametrize(
    ("spec", "says"), [("none.py:score", "none.py is neither"), ("mine.py:other", "the file has score")]
)
def test_a_function_that_cannot_be_used_is_one_line_and_leaves_nothing(tmp_path, capsys, monkeypatch, spec, says):
    settings = task(tmp_path / "task")
    where = f"reward.function={tmp_path}/task/{spec}"
    assert says in error_of(capsys, tmp_path, *settings, where)
