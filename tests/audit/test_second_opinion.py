"""A second grader in a process that may hang or die: its word is listed, its failures cost one answer."""

from __future__ import annotations

import sys
import time

import pytest

from audit.second_opinion import MathVerify, MathVerifyError, second_opinions, stored_rows
from rollout.records import Scored, StopReason
from run.trajectories import write_step
from tests.support.builders import record

# Says right for "yes", wrong for "no", dies for "die", hangs for "hang".
FAKE = """
import json, sys, time
for line in sys.stdin:
    text = json.loads(line)["text"]
    if text == "die": sys.exit(1)
    if text == "hang": time.sleep(1000)
    print(json.dumps({"right": text == "yes"}), flush=True)
"""


@pytest.fixture
def grader():
    made = MathVerify([sys.executable, "-c", FAKE], seconds=1.0)
    yield made
    made.close()


def test_a_hanging_or_dying_process_costs_one_answer_and_is_replaced(grader):
    assert [grader(text, "1") for text in ("yes", "no")] == [True, False]
    started = time.monotonic()
    assert grader("hang", "1") is None
    assert time.monotonic() - started < 30
    assert grader("yes", "1") is True
    assert grader("die", "1") is None
    assert grader("no", "1") is False
    assert grader.restarts == 2


def test_closing_ends_the_process(grader):
    grader("yes", "1")
    process = grader._process
    grader.close()
    assert process.poll() is not None
    grader.close()


def test_answers_alone_are_asked_about_each_text_once(tmp_path):
    reasons = ["no_box", "turn_tokens", "correct"]
    stops = [StopReason.ANSWERED, StopReason.TURN_TOKENS, StopReason.ANSWERED]
    records = [record("PA", sample=i, first_id=10 * i, stop=stop) for i, stop in enumerate(stops)]
    (tmp_path / "trajectories").mkdir()
    scores = [
        Scored(record=r, reward=-1.0, reason=reason, advantage=0.0) for r, reason in zip(records, reasons, strict=True)
    ]
    for step in (2, 10):
        write_step(tmp_path, step, records, scores, ["1"])
    asked = []

    def grade(text: str, answer: str) -> bool:
        asked.append((text, answer))
        return True

    found = list(second_opinions(stored_rows(tmp_path), lambda ids: f"<think>t</think>{list(ids)}", grade))
    assert [(r["reason"], text, verdict) for r, text, verdict in found] == [
        ("no_box", "[1]", True), ("correct", "[21]", True)
    ] * 2  # fmt: skip
    assert asked == [("[1]", "1"), ("[21]", "1")]


def test_math_verify_grades_what_the_box_rule_leaves_out_and_survives_a_power_tower():
    pytest.importorskip("math_verify", reason="math-verify is not installed (requirements/math.txt)")
    grader = MathVerify(seconds=3.0)
    try:
        assert grader("\\boxed{\\frac{2}{4}}", "0.5") is True
        assert grader("the answer is 7.", "7") is True
        assert grader("\\boxed{8}", "7") is False
        assert grader("\\boxed{9^{9^{9^{9}}}}", "7") in (None, False)
        assert grader("\\boxed{7}", "7") is True
    finally:
        grader.close()


def test_the_process_starts_from_any_folder(tmp_path, monkeypatch):
    fake = "parse = lambda text, parsing_timeout: text\nverify = lambda gold, said, timeout_seconds: gold == said\n"
    (tmp_path / "math_verify.py").write_text(fake)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    grader = MathVerify()
    try:
        assert [grader(text, "7") for text in ("\\boxed{7}", "7")] == [True, False]
    finally:
        grader.close()


def test_without_the_package_the_mend_is_named(monkeypatch):
    monkeypatch.setattr("audit.second_opinion.find_spec", lambda name: None)
    with pytest.raises(MathVerifyError, match=r"pip install -r requirements/math\.txt"):
        MathVerify()
