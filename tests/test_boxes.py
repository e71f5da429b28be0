"""The boxed answer of a message; cleaning and equality are tested through the grader (test_reward.py)."""

from __future__ import annotations

import pytest

from reward import clean, equal, final_answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so \\boxed{3}, no: \\boxed{ 1,234. }", "1,234"),
        ("\\boxed{\\text{no}}", "no"),
        ("<think>\\boxed{1}</think>\\boxed{2}", "2"),
        ("<think>\\boxed{1}</think>two", None),
        ("\\boxed{1} \\boxed{2", None),
        ("\\boxed{ }", None),
        ("\\boxed{1}<tool_call>{}</tool_call>", None),
        ("nothing", None),
    ],
)
def test_the_last_box_outside_thinking_is_the_answer(text, answer):
    assert final_answer(text) == answer


def test_equal_answers_are_equal_in_any_spelling():
    assert equal(clean("\\dfrac{1}{2}"), clean("0.50"))
    assert not equal(clean("1/3"), clean("0.333"))
