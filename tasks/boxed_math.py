"""Sums with the Python tool: the answer stands in \\boxed{...}. A template to copy; the shipped task as one file.

    tool.enabled: true          reward.function: "tasks/boxed_math.py:score"

A row is {"prompt": "What is 77*27+60?", "answer": "2139"}.
"""

from __future__ import annotations

from boxes import after_thinking, clean, closing_brace, equal, last_box


def score(trajectory, problem: dict) -> tuple[float, str]:
    """+1 where the last box of the final text holds the answer, else -1, with the reason."""
    if trajectory.stop != "answered":
        return -1.0, str(trajectory.stop)
    text = after_thinking(trajectory.final_text)
    begin = last_box(text)
    if begin is None:
        return -1.0, "no_box"
    end = closing_brace(text, begin)
    if end is None:
        return -1.0, "unclosed_box"
    if equal(clean(text[begin:end]), clean(str(problem["answer"]))):
        return 1.0, "correct"
    return -1.0, "wrong_value"


def gold(problem: dict) -> str:
    """The final text that `check` scores."""
    return f"The answer is \\boxed{{{problem['answer']}}}."
