"""Two runs are paired step by step."""

from __future__ import annotations

import pytest

from report.compare import compare, paired, settings_changed, student_95
from report.runs import RunError, read_run
from run.stretches import begin_stretch
from tests.support.runs import metrics_row, write_run


def runs(tmp_path, ours, theirs):
    return read_run(write_run(tmp_path / "a", ours)), read_run(write_run(tmp_path / "b", theirs))


def test_the_interval_is_that_of_the_paired_differences(tmp_path):
    # The runs swing widely, their differences are 0.1, 0.2, 0.1, 0.2: mean 0.15, standard error 0.02887.
    swings, gaps = [0.0, 5.0, -5.0, 1.0], [0.1, 0.2, 0.1, 0.2]
    a, b = runs(
        tmp_path, [metrics_row(s + 1, reward=swing) for s, swing in enumerate(swings)],
        [metrics_row(s + 1, reward=swing + gap) for s, (swing, gap) in enumerate(zip(swings, gaps, strict=True))],
    )  # fmt: skip
    [pair] = [p for p in paired(a, b, last=10) if p.name == "mean reward"]
    assert pair.difference == pytest.approx(0.15)
    assert pair.half == pytest.approx(3.18 * 0.02887, rel=0.05)
    assert (pair.steps, pair.better) == (4, 1)


@pytest.mark.parametrize(("freedom", "point"), [(3, 3.182), (9, 2.262), (29, 2.045), (10_000, 1.960)])
def test_students_t_agrees_with_the_table(freedom, point):
    assert student_95(freedom) == pytest.approx(point, rel=0.04)


def test_more_seconds_are_worse_and_length_is_neither(tmp_path):
    slow = [metrics_row(s, seconds=9.0, length=90.0) for s in range(1, 6)]
    a, b = runs(tmp_path, [metrics_row(s) for s in range(1, 6)], slow)
    found = {pair.name: pair.better for pair in paired(a, b, last=10)}
    assert found["seconds a step"] == -1 and found["tokens a trajectory"] == 0


def test_only_the_last_common_steps_count_and_few_have_no_interval(tmp_path):
    a, b = runs(tmp_path, [metrics_row(s) for s in range(1, 9)], [metrics_row(s, reward=9.0) for s in (2, 3)])
    [pair] = [p for p in paired(a, b, last=1) if p.name == "mean reward"]
    assert (pair.steps, pair.a, pair.half, pair.better) == (1, pytest.approx(0.3), None, 0)


def test_a_step_that_lacks_a_metric_is_left_out_not_replaced_by_an_older_one(tmp_path):
    skipped = {"loss": None, "grad_norm": None}
    ours = [metrics_row(s, grad_norm=float(s)) for s in range(1, 9)]
    theirs = [metrics_row(s, grad_norm=float(s)) | (skipped if s in (6, 8) else {}) for s in range(1, 9)]
    theirs[6].pop("entropy")
    found = {pair.name: pair for pair in paired(*runs(tmp_path, ours, theirs), last=4)}
    assert (found["gradient norm"].a, found["gradient norm"].where) == (6.0, "5-7 (2)")  # steps 5 and 7
    assert found["entropy, nats"].where == "5-8 (3)"
    assert found["mean reward"].where == "5-8 (4)"


def test_evaluations_are_paired_over_the_last_that_both_runs_made(tmp_path):
    measured = [metrics_row(s) | ({"eval_avg_at_k": 0.1 * s} if s % 3 == 0 else {}) for s in range(1, 11)]
    measured[5]["eval_avg_at_k"] = None
    [pair] = [p for p in paired(*runs(tmp_path, measured, measured), last=2) if p.name == "evaluation"]
    assert (pair.where, pair.a) == ("9-9 (1)", pytest.approx(0.9))


def test_what_metrics_call_correct_is_called_so(tmp_path):
    a, b = runs(tmp_path, [metrics_row(1)], [metrics_row(1)])
    assert "correct" in [pair.name for pair in paired(a, b, last=1)]
    assert "right" not in compare(a.path, b.path, 1, None).replace(str(tmp_path), "").split()


def test_runs_without_a_common_step_are_refused(tmp_path):
    with pytest.raises(RunError, match="no step in common"):
        paired(*runs(tmp_path, [metrics_row(1)], [metrics_row(2)]), last=5)


def test_the_table_and_the_page_name_runs_and_settings(tmp_path):
    a, b = runs(tmp_path, [metrics_row(s) for s in (1, 2)], [metrics_row(s) for s in (1, 2)])
    text = b.config.to_json().replace('"seed": 0', '"seed": 7')
    (b.path / "config.json").write_text(text)
    table = compare(a.path, b.path, 10, None)
    assert "train.seed: 0 -> 7" in table and "mean reward" in table
    assert settings_changed(read_run(a.path), read_run(b.path)) == [("train.seed", "0", "7")]
    page = (b.path / "compare.html").read_text()
    assert "train.seed" in page and "blob-charts" in page


def test_what_a_resume_changed_is_said_in_the_table_and_on_the_page(tmp_path):
    a, b = runs(tmp_path, [metrics_row(s) for s in (1, 2)], [metrics_row(s) for s in (1, 2)])
    assert "changed by" not in compare(a.path, b.path, 10, None)
    first, seed = a.config.to_json(), ('"seed": 0', '"seed": 7')
    both = first.replace(*seed).replace('"steps": 50', '"steps": 60')
    begin_stretch(a.path, 2, first.replace(*seed))
    begin_stretch(a.path, 3, both)
    begin_stretch(b.path, 2, both)
    said = compare(a.path, b.path, 10, None).splitlines()
    assert said[2:4] == [
        "A, changed by a resume: from step 2: train.seed 0 -> 7; from step 3: train.steps 50 -> 60",
        "B, changed by a resume: from step 2: train.steps 50 -> 60; from step 2: train.seed 0 -> 7",
    ]
    assert "train.seed:" not in "\n".join(said)  # the last settings are the same
    assert "A, changed by a resume: from step 2: train.seed 0 -&gt; 7" in (b.path / "compare.html").read_text()
