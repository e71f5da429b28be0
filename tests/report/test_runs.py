"""A run folder as columns, and the numbers that a page makes of them."""

from __future__ import annotations

import pytest

from report import charts, page
from report.runs import RunError, read_run
from tests.support.runs import metrics_row, write_run


def test_a_missing_value_is_unknown_and_a_missing_reason_is_zero(tmp_path):
    rows = [metrics_row(1), metrics_row(2, reasons={"correct": 4})]
    del rows[0]["entropy"]
    run = read_run(write_run(tmp_path / "r", rows))
    assert run.columns["step"] == [1.0, 2.0]
    assert run.columns["entropy"] == [None, 0.3]
    assert run.columns["reasons/no_box"] == [1.0, 0.0]


def test_phases_add_up_and_occupancy_is_a_share_of_the_decode_rows(tmp_path):
    columns = read_run(write_run(tmp_path / "r", [metrics_row(1, eval_seconds=3.0)])).columns
    assert [columns[f"phase_{name}"] for name in ("rollout", "update", "other", "eval")] == [
        [1.0],
        [0.5],
        [0.5],
        [3.0],
    ]
    assert columns["occupancy"] == [0.5]  # 64 of 128 rows
    assert columns["waiting"] == [0.1]


def test_a_folder_without_a_step_is_refused(tmp_path):
    with pytest.raises(RunError, match=r"no metrics\.jsonl; name the folder of a run"):
        read_run(tmp_path)
    with pytest.raises(RunError, match="has not finished a step"):
        read_run(write_run(tmp_path / "r", []))


def test_an_evaluation_carries_its_interval(tmp_path):
    row = metrics_row(
        1, eval_avg_at_k=0.5, eval_avg_stderr=0.1, eval_problems=1000, eval_k=4, eval_pass_at_k=0.75, eval_cut=0.0,
        eval_seconds=2.0,
    )  # fmt: skip
    assert page.evaluation(row) == {
        "step": "1", "size": "1,000 × 4", "right": "50.0 %", "interval": "30.4 to 69.6 %", "any": "75.0 %",
        "cut": "0.0 %", "seconds": "2.0",
    }  # fmt: skip
    columns = read_run(write_run(tmp_path / "r", [row])).columns
    assert columns["eval_low"] == [pytest.approx(0.304)] and columns["eval_high"] == [pytest.approx(0.696)]


def test_charts_without_numbers_are_left_out(tmp_path):
    run = read_run(write_run(tmp_path / "r", [metrics_row(1), metrics_row(2)]))
    shown = charts.drawable(charts.LEARNING, run.columns)
    titles = [chart.title for chart in shown.charts]
    assert "Entropy" in titles and "Learning rate" not in titles
    assert [s.column for s in shown.charts[0].series] == ["correct"]


def test_a_distilled_run_shows_its_teacher_and_what_its_pass_took(tmp_path):
    rows = [metrics_row(1, teacher_divergence=0.5, teacher_gap=0.6, teacher_entropy=0.1, seconds_teacher=0.3)]
    run = read_run(write_run(tmp_path / "r", rows))
    shown = {c.title: [s.column for s in c.series] for c in charts.drawable(charts.LEARNING, run.columns).charts}
    assert shown["Distance from the teacher"] == ["teacher_divergence", "teacher_gap"]
    assert shown["Entropy"] == ["entropy", "teacher_entropy"]
    [phases, *_] = charts.drawable(charts.TIME, run.columns).charts
    assert "phase_teacher" in [s.column for s in phases.series]
    assert run.columns["phase_other"] == [pytest.approx(0.2)]


def test_a_logarithmic_axis_needs_values_above_zero(tmp_path):
    run = read_run(write_run(tmp_path / "r", [metrics_row(1, mismatch_mean=0.0), metrics_row(2, mismatch_mean=1.0)]))
    assert not charts.drawable(charts.MISMATCH, run.columns).charts[0].log
    run = read_run(write_run(tmp_path / "s", [metrics_row(1, mismatch_mean=0.1), metrics_row(2, mismatch_mean=1.0)]))
    assert charts.drawable(charts.MISMATCH, run.columns).charts[0].log


def test_numbers_are_said_shortly():
    assert [page.large(n) for n in (12, 171_125, 2.5e6, 3e9)] == ["12", "171,125", "2.5 million", "3 billion"]
    assert [page.duration(s) for s in (39, 1200, 10_000)] == ["39 s", "20 min", "2.8 h"]
    assert page.share(1, 0) == "–"
