"""The tiny task: sums that need one or two tool calls, their right traces, and the sloppy ones.

A problem is "What is 69*58+23?" (one call) or "Let x be 69*58. What is x+23?" (two). Inputs have two digits and each
value has four, all different, so that a tiny model can learn to copy a number: the distance is constant, and "which
digit followed this one?" has one answer. A trace is the list of assistant turns with the tool result that follows
each, in a model family's markup (`Dialect`). A sloppy trace fails at one choice (a box left out, a call left out ...),
which a policy gradient can fix; none teaches random digits. Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random


@dataclass(frozen=True)
class Dialect:
    """What a family writes around a program and an answer. The end tokens follow the texts of `trace`."""

    call_begin: str
    call_end: str
    answer_begin: str = ""
    aside_begin: str = ""  # around what is said where no user sees it
    turn_end: str = "<|im_end|>"  # ends a turn with a call
    answer_end: str = "<|im_end|>"


QWEN = Dialect('<tool_call>\n{"name": "python", "arguments": {"code": "', '"}}\n</tool_call>')

_NEXT = "<|end|><|start|>assistant"
HARMONY = Dialect(
    call_begin=f"<|channel|>analysis<|message|>Use Python.{_NEXT}<|channel|>commentary to=functions.python "
    '<|constrain|>json<|message|>{"code": "',
    call_end='"}',
    answer_begin="<|channel|>final<|message|>",
    aside_begin="<|channel|>analysis<|message|>",
    turn_end="<|call|>",
    answer_end="<|return|>",
)

# Share of each kind of trace in the shipped model's habits. "no_box" is the likeliest, so greedy answers fail too.
SLOPPY_MIX = {
    "good": 0.13,
    "no_box": 0.52,
    "no_tool": 0.15,
    "wrong_expression": 0.08,
    "short_copy": 0.03,
    "forgotten_call": 0.09,
}
# Of the shipped GPT-OSS: only harmony has a wrong channel to answer in.
HARMONY_MIX = {
    "good": 0.13,
    "no_box": 0.40,
    "wrong_channel": 0.14,
    "no_tool": 0.15,
    "wrong_expression": 0.08,
    "short_copy": 0.03,
    "forgotten_call": 0.07,
}


@dataclass(frozen=True)
class Problem:
    a: int
    b: int
    c: int
    calls: int  # 1: the whole sum in one call; 2: the product first

    @property
    def prompt(self) -> str:
        if self.calls == 1:
            return f"What is {self.a}*{self.b}+{self.c}?"
        return f"Let x be {self.a}*{self.b}. What is x+{self.c}?"

    @property
    def answer(self) -> int:
        return self.a * self.b + self.c


@dataclass(frozen=True)
class Step:
    """One assistant turn (without its end token) and the tool's answer to it; None after the last turn."""

    text: str
    result: str | None


def _is_plain(value: int) -> bool:
    """Four digits, no two alike."""
    return 1000 <= value <= 9999 and len(set(str(value))) == 4


def draw_problem(rng: Random) -> Problem:
    while True:
        problem = Problem(rng.randint(10, 99), rng.randint(10, 99), rng.randint(10, 99), rng.randint(1, 2))
        if _is_plain(problem.a * problem.b) and _is_plain(problem.answer):
            return problem


def draw_problems(rng: Random, count: int) -> list[Problem]:
    """`count` distinct problems."""
    seen: dict[Problem, None] = {}
    while len(seen) < count:
        seen[draw_problem(rng)] = None
    return list(seen)


def draw_kind(rng: Random, mix: Mapping[str, float] = SLOPPY_MIX) -> str:
    return rng.choices(list(mix), weights=list(mix.values()))[0]


def trace(problem: Problem, kind: str, dialect: Dialect = QWEN) -> list[Step]:
    """The turns of one trace of the given kind; "good" is right, every other kind ends in a wrong answer."""

    def call(expression: str, value: int) -> Step:
        return Step(f"{dialect.call_begin}print({expression}){dialect.call_end}", str(value))

    def boxed(value: int) -> Step:
        return Step(f"{dialect.answer_begin}The answer is \\boxed{{{value}}}.", None)

    a, b, c = problem.a, problem.b, problem.c
    product, answer = a * b, problem.answer
    if kind == "no_tool":
        return [boxed(100 * a + b)]  # never the answer: c would have to be b + a * (100 - b), above 99
    if problem.calls == 1:
        calls = [call(f"{a}*{b}+{c}", answer)]
        if kind in ("wrong_expression", "forgotten_call"):  # one call: the addition is what can be forgotten
            return [call(f"{a}*{b}", product), boxed(product)]
    else:
        calls = [call(f"{a}*{b}", product), call(f"{product}+{c}", answer)]
        if kind == "forgotten_call":
            return [calls[0], boxed(product)]
        if kind == "wrong_expression":
            return [calls[0], call(f"{product}", product), boxed(product)]
    if kind == "no_box":
        return [*calls, Step(f"{dialect.answer_begin}The answer is {answer}.", None)]
    if kind == "wrong_channel":
        return [*calls, Step(f"{dialect.aside_begin}The answer is \\boxed{{{answer}}}.", None)]
    if kind == "short_copy":
        return [*calls, boxed(answer // 10)]
    return [*calls, boxed(answer)]
