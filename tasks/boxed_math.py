"""Sums with the Python tool: the answer stands in \\boxed{...}. A template to copy; the shipped task as one file.

    tool.enabled: true          reward.function: "tasks/boxed_math.py:score"

A row is {"prompt": "What is 77*27+60?", "answer": "2139"}.
"""

from __future__ import annotations

from reward import grade


def score(trajectory, problem: dict) -> tuple[float, str]:
    """+1 where the last box of the final text holds the answer, else -1, with the reason."""
    if trajectory.stop != "answered":
        return -1.0, str(trajectory.stop)
    verdict = grade(trajectory.final_text, problem["answer"])
    return (1.0 if verdict.correct else -1.0), str(verdict.reason)


def gold(problem: dict) -> str:
    """The final text that `check` scores."""
    return f"The answer is \\boxed{{{problem['answer']}}}."
