"""The page is one complete file that loads nothing, with every trajectory it says it has."""

from __future__ import annotations

import hashlib
import re

import pytest
from transformers import AutoTokenizer

from report.html import UPLOT
from report.page import ledger, spread_steps, write_report
from report.runs import read_run
from tests.support.builders import record
from tests.support.runs import TINY, metrics_row, write_run


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY)


def page(tmp_path, tokenizer, rows, groups=None, limit=100, name="r") -> str:
    run_dir = write_run(tmp_path / name, rows, groups)
    write_report(run_dir, tokenizer, None, limit)
    assert not list(run_dir.glob("*.partial"))
    return (run_dir / "report.html").read_text()


def test_the_page_loads_nothing_from_outside(tmp_path, tokenizer):
    text = page(tmp_path, tokenizer, [metrics_row(1)], {1: [record("PPA")]})
    assert not re.search(r"<(?:link|img|iframe|script)[^>]*(?:src|href)=", text)
    assert "url(" not in text and "@import" not in text
    assert "default-src &#39;none&#39;" in text and "unsafe-eval" not in text


def test_a_run_without_evaluation_or_trajectories_has_no_such_section(tmp_path, tokenizer):
    text = page(tmp_path, tokenizer, [metrics_row(1)])
    assert 'id="evaluation"' not in text and 'id="browser"' not in text
    assert 'href="#evaluation"' not in text and 'href="#trajectories"' not in text


def test_names_and_settings_are_escaped(tmp_path, tokenizer):
    row = metrics_row(1, reasons={"<img src=x onerror=alert(1)>": 4})
    text = page(tmp_path, tokenizer, [row], name="<script>alert(1)<")
    assert "<script>alert" not in text and "<img" not in text


def test_each_step_that_fits_has_its_block(tmp_path, tokenizer):
    groups = {step: [record("PA", sample=i) for i in range(4)] for step in range(1, 12)}
    text = page(tmp_path, tokenizer, [metrics_row(s) for s in groups], groups, limit=12)
    assert re.findall(r'id="blob-step-(\d+)"', text) == ["1", "6", "11"]
    assert "Trajectories of 3 of 11 steps, evenly spread." in text


def test_a_step_whose_metrics_line_was_cut_short_counts_among_the_steps(tmp_path, tokenizer):
    run_dir = write_run(tmp_path / "r", [metrics_row(1), metrics_row(2)], {s: [record("PA")] for s in (1, 2, 3)})
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "rew')
    assert write_report(run_dir, tokenizer, None, 100).endswith("trajectories of 3 of 3 steps")
    assert "Every trajectory of the run." in (run_dir / "report.html").read_text()
    assert write_report(run_dir, tokenizer, None, 2).endswith("trajectories of 2 of 3 steps")
    assert "Trajectories of 2 of 3 steps, evenly spread." in (run_dir / "report.html").read_text()


@pytest.mark.parametrize(
    ("rows", "limit", "steps"),
    [
        ({1: 4, 2: 4, 3: 4}, 12, [1, 2, 3]),
        ({1: 4, 2: 4, 3: 4}, 11, [1, 3]),
        ({1: 4, 2: 4, 3: 4}, 4, [3]),
        ({7: 400}, 4, [7]),
        ({}, 4, []),
    ],
)
def test_steps_are_spread_evenly_within_the_limit(rows, limit, steps):
    assert spread_steps(rows, limit) == steps


def test_the_ledger_adds_up_to_all_trajectories(tmp_path):
    rows = [metrics_row(1, trajectories=5), metrics_row(2, reasons={"correct": 4})]
    made = ledger(read_run(write_run(tmp_path / "r", rows)))
    assert [(line["reason"], line["count"]) for line in made["lines"]] == [
        ("correct", "7"), ("no_box", "1"), ("tool_infra", "1")
    ]  # fmt: skip
    assert made["total"] == "9"
    assert (made["lines"][0]["before"], made["lines"][0]["after"]) == ("75.0 %", "100.0 %")


def test_the_chart_library_is_the_published_one():
    # sha256 of dist/uPlot.iife.min.js in the npm package uplot 1.6.32
    digest = hashlib.sha256((UPLOT / "uPlot.iife.min.js").read_bytes()).hexdigest()
    assert digest == "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f"
