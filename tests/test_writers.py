"""Each step stands once in the metrics, and a trajectory file is complete or absent."""

from __future__ import annotations

import json

from report.writers import RunWriter, console_line
from tests.builders import record, scored


def steps(run_dir) -> list[int]:
    return [json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_rewinding_removes_what_came_after_the_checkpoint(tmp_path):
    writer = RunWriter(tmp_path)
    for step in (1, 2, 10):
        writer.metrics({"step": step})
        writer.trajectories(step, [record("PA")], scored([record("PA")], [1.0]), ["7"])
    writer.rewind(2)
    assert steps(tmp_path) == [1, 2]
    assert sorted(p.name for p in (tmp_path / "trajectories").iterdir()) == ["step_1.jsonl", "step_2.jsonl"]
    writer.metrics({"step": 3})
    assert steps(tmp_path) == [1, 2, 3]


def test_a_trajectory_row_holds_tokens_mask_answer_and_scores(tmp_path):
    sound, spoilt = record("PPAOA", sample=0), record("PA", sample=1)
    RunWriter(tmp_path).trajectories(1, [sound, spoilt], scored([sound], [1.0]), ["7"])
    first, second = (json.loads(x) for x in (tmp_path / "trajectories/step_1.jsonl").read_text().splitlines())
    assert first["token_ids"] == list(sound.token_ids)
    assert first["sampled"] == [0, 0, 1, 0, 1]
    assert [(t["start"], t["end"]) for t in first["turns"]] == [(2, 3), (4, 5)]
    assert (first["answer"], first["reward"], first["advantage"]) == ("7", 1.0, 1.0)
    assert (second["reward"], second["advantage"], second["reason"]) == (None, None, None)


def test_the_console_line_shows_what_the_step_has():
    line = console_line({"step": 3, "reward": -0.25, "loss": 0.123456}, 50, ("reward", "eval_avg_at_k", "loss"))
    assert line == "step 3/50  reward -0.25  loss 0.1235"
