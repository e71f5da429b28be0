"""A second grader in a process that may hang or die: its word is listed, its failures cost one answer."""

from __future__ import annotations

import json
import sys
import time

import pytest

from second_opinion import MathVerify, MathVerifyError, second_opinions, stored_rows

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


def row(stop: str, reason: str | None, ids: list[int]) -> dict:
    return {"stop": stop, "reason": reason, "answer": "1", "token_ids": [9, *ids], "policy_step": 0,
            "prompt_index": 0, "sample_index": 0, "turns": [{"start": 1, "end": 1 + len(ids)}]}  # fmt: skip


def test_answers_alone_are_asked_about_each_text_once(tmp_path):
    (tmp_path / "trajectories").mkdir()
    rows = [row("answered", "no_box", [1]), row("turn_tokens", "turn_tokens", [2]), row("answered", "correct", [3])]
    for step in (2, 10):
        (tmp_path / f"trajectories/step_{step}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    asked = []

    def grade(text: str, answer: str) -> bool:
        asked.append((text, answer))
        return True

    found = list(second_opinions(stored_rows(tmp_path), lambda ids: f"<think>t</think>{ids}", grade))
    assert [(r["reason"], text, verdict) for r, text, verdict in found] == [
        ("no_box", "[1]", True), ("correct", "[3]", True)
    ] * 2  # fmt: skip
    assert asked == [("[1]", "1"), ("[3]", "1")]


def test_math_verify_grades_what_the_box_rule_leaves_out_and_survives_a_power_tower():
    pytest.importorskip("math_verify", reason="math-verify is not installed (requirements-math.txt)")
    grader = MathVerify(seconds=3.0)
    try:
        assert grader("\\boxed{\\frac{2}{4}}", "0.5") is True
        assert grader("the answer is 7.", "7") is True
        assert grader("\\boxed{8}", "7") is False
        assert grader("\\boxed{9^{9^{9^{9}}}}", "7") in (None, False)
        assert grader("\\boxed{7}", "7") is True
    finally:
        grader.close()


def test_without_the_package_the_mend_is_named(monkeypatch):
    monkeypatch.setattr("second_opinion.find_spec", lambda name: None)
    with pytest.raises(MathVerifyError, match=r"pip install -r requirements-math\.txt"):
        MathVerify()
