"""The grader on every handed case and on hostile text; reason codes, rewards and group advantages."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import reward
from config import RewardConfig, parse_config
from reward import (
    Grade,
    Reason,
    check_answer,
    grade,
    grade_trajectory,
    group_advantages,
    overlong_penalty,
    reward_of,
    score,
    tool_bonus,
)
from rollout.records import RolloutRecord, StopReason, ToolCall, Turn
from tests.support.builders import record as spelled
from tests.support.oracle import mutant

CASES = Path(__file__).parent / "cases"


def read_cases(name):
    return [json.loads(line) for line in (CASES / name).read_text(encoding="utf-8").splitlines()]


HANDED = read_cases("reward.jsonl") + read_cases("reward_policy.jsonl")


@pytest.mark.parametrize("case", HANDED, ids=[case["id"] for case in HANDED])
def test_handed_case_is_graded_as_its_author_says(case):
    verdict = grade(case["text"], case["answer"])
    assert verdict.correct is case["right"], f"{case['why']}: {verdict}"
    assert (verdict.reason is Reason.CORRECT) is verdict.correct


@pytest.mark.parametrize("case", HANDED, ids=[case["id"] for case in HANDED])
def test_handed_reference_is_readable_and_right_in_its_own_box(case):
    text = check_answer(case["answer"])
    assert grade(f"So \\boxed{{{text}}}.", case["answer"]).correct


@pytest.mark.parametrize(
    ("text", "answer", "reason"),
    [
        (r"\boxed{42}", "42", Reason.CORRECT),
        (r"\boxed{41}", "42", Reason.WRONG_VALUE),
        ("42", "42", Reason.NO_BOX),
        ("", "42", Reason.NO_BOX),
        (r"\boxed 42", "42", Reason.NO_BOX),
        (r"\boxed{42} or rather \boxed{42", "42", Reason.UNCLOSED_BOX),
        (r"\boxed{\{42}", r"\{42", Reason.CORRECT),
        (r"\boxed{42\}", "42", Reason.UNCLOSED_BOX),
        (r"\boxed{ $ \, $ . }", "42", Reason.EMPTY_BOX),
        (r"<think>\boxed{42}</think>", "42", Reason.BOX_IN_THINKING),
        (r"<think>\boxed{42}", "42", Reason.BOX_IN_THINKING),
        (r"so \boxed{42}" + "\n</think>\nDone.", "42", Reason.BOX_IN_THINKING),
        (r"<think>a</think> \boxed{7} </think> \boxed{42}", "42", Reason.CORRECT),
        ("\\boxed{42}\n<tool_call>\n{}\n</tool_call>", "42", Reason.TOOL_CALL),
        ("<tool_call>\n{}\n</tool_call>\nI expect \\boxed{42}.", "42", Reason.TOOL_CALL),
        ("\\boxed{42}\n<tool_call>\n{", "42", Reason.TOOL_CALL),
        ("<think><tool_call></think>\\boxed{42}", "42", Reason.CORRECT),
        (r"\boxed{}", "", Reason.BAD_REFERENCE),
        (r"\boxed{None}", None, Reason.BAD_REFERENCE),
        (r"\boxed{nan}", math.nan, Reason.BAD_REFERENCE),
    ],
)
def test_each_reason_has_its_text(text, answer, reason):
    assert grade(text, answer).reason is reason


@pytest.mark.parametrize(
    ("box", "answer", "right"),
    [
        (r"\{1,2\}", "2", False),
        ("1, 2", "1,2", True),
        ("(1,\\;2)", "(1, 2)", True),
        ("4 2", "42", False),
        ("1 234", "1234", False),
        ("1, 234", "1234", False),
        ("1\\,234", "1234", True),
        ("1,\\!234", "1234", True),
        ("12,34", "1234", False),
        ("0,123", "123", False),
        ("1,234.50", "1234.5", True),
        ("-1,234", "-1234", True),
        ("- 5", "-5", True),
        ("--5", "5", False),
        ("2/4", "1/2", True),
        ("1 / 2", "0.50", True),
        ("1/0", "1/0", True),
        ("1/0", "2/0", False),
        ("0/0", "0", False),
        (r"\frac{-1}{2}", "-1/2", True),
        (r"\frac{1}{-2}", "-0.5", True),
        (r"-\frac{-1}{2}", "1/2", True),
        (r"\frac1{2}", "0.5", True),
        (r"\frac{1}2", "0.5", True),
        (r"\frac123", "1/23", False),
        (r"\frac{\text{1}}{2}", "0.5", True),
        (r"\frac{1,000}{2}", "500", True),
        (r"1\frac{1}{2}", "3/2", False),
        ("42\\%", "42", False),
        ("42 cm", "42", False),
        (r"42\text{ cm}", "42", False),
        (r"42\text{ cm}", "42 cm", True),
        (r"\textit{42}", "42", False),
        (r"\mathrm{ even }", "even", True),
        (r"\textbf{(C)}", "C", False),
        ("{42}", "42", True),
        ("{4}{2}", "42", False),
        ("$\\text{42.}$", "42", True),
        ("42..", "42", False),
        ("x + 1", "x+1", True),
        (r"2 \pi", r"2\pi", True),
        ("4_2", "42", False),
        ("0x2a", "42", False),
        ("4.2e1", "42", False),
        ("٤٢", "42", False),
        ("½", "1/2", False),
        ("1e3", "1000", False),
        ("-0.0", "0", True),
        ("00", "0", True),
        ("0.10", ".1", True),
        ("\u200342\u2003", "42", True),
    ],
)
def test_box_content_is_cleaned_and_compared_exactly(box, answer, right):
    assert grade(f"\\boxed{{{box}}}", answer).correct is right
    assert grade("\\boxed{" + answer + "}", box).correct is right, "the comparison is symmetric"


def test_a_transcript_is_graded_by_its_last_assistant_message_only():
    call = "<tool_call>\n{}\n</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\n\\boxed{42}\n</tool_response>"
    assert grade(call + "<|im_end|>", "42").reason is Reason.TOOL_CALL
    assert grade(call + "<|im_end|>\n<|im_start|>assistant\nDone.<|im_end|>", "42").reason is Reason.NO_BOX
    assert grade(call + "<|im_end|>\n<|im_start|>assistant\n\\boxed{42}", "42").correct
    asked_on = "\\boxed{42}<|im_end|>\n<|im_start|>user\nSure? \\boxed{7}<|im_end|>"
    assert grade(asked_on, "42").correct


HOSTILE = {
    "unclosed boxes": r"\boxed{" * 2000,
    "power tower": r"\boxed{7^{7^{7^{7^{7}}}} - 7}",
    "long integer": f"\\boxed{{{'9' * 6000}}}",
    "long fraction": f"\\boxed{{\\frac{{{'9' * 6000}}}{{{'7' * 6000}}}}}",
    "control characters": "\\boxed{\0\x1b4\u202e2\ud800}",
    "lone surrogate": "\udfff\\boxed{42\ud800}",
    "escaped braces": "\\boxed{" + "\\{" * 5000,
    "blanks": "\\boxed" + " " * 20000 + "\\boxed{" + " " * 20000 + "4" + " " * 20000 + "2}",
    "nested wrappers": "\\boxed{" + "\\text{" * 1000 + "42" + "}" * 1001,
    "thousands": "\\boxed{1" + ",234" * 5000 + "}",
    "think tags": "<think></think>" * 3000 + "\\boxed{42}",
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("answer", ["42", 10**5000, f"1/{'3' * 5000}"], ids=["short", "long", "fraction"])
def test_hostile_text_gets_a_reason_and_is_never_evaluated(name, answer):
    verdict = grade(HOSTILE[name], answer)
    assert verdict.correct is (name in ("nested wrappers", "think tags") and answer == "42")


def test_integers_past_pythons_digit_limit_are_compared_exactly():
    assert grade(HOSTILE["long integer"], "9" * 6000).correct
    assert grade(HOSTILE["long integer"], 10**6000 - 1).correct
    assert not grade(HOSTILE["long integer"], "9" * 5999 + "8").correct
    assert grade(HOSTILE["long fraction"], "9/7").correct


@pytest.mark.parametrize("answer", ["", "  ", "$$", None, True, [], {}, math.inf, math.nan, r"\boxed{4}", "{", "4}"])
def test_a_reference_that_nothing_could_match_is_refused(answer):
    with pytest.raises(ValueError, match="answer"):
        check_answer(answer)
    assert not grade("\\boxed{}", answer).correct


@pytest.mark.parametrize(("answer", "text"), [(42, "42"), (0.5, "0.5"), (1e22, "1" + "0" * 22), (" 42 ", " 42 ")])
def test_a_readable_reference_is_returned_as_text(answer, text):
    assert check_answer(answer) == text


@pytest.mark.parametrize("stop", list(StopReason))
def test_only_an_answered_trajectory_can_be_right(stop):
    verdict = grade_trajectory(r"\boxed{42}", stop, "42")
    assert verdict.correct is (stop is StopReason.ANSWERED)
    if stop is not StopReason.ANSWERED:
        assert verdict.reason == stop.value
    if stop is StopReason.TOOL_INFRA:
        assert not verdict.is_trained
        with pytest.raises(ValueError, match="tool_infra"):
            reward_of(verdict)
    else:
        assert verdict.is_trained and reward_of(verdict) == (1.0 if verdict.correct else -1.0)


def test_a_users_reward_stands_as_it_is_and_its_words_never_drop_a_trajectory():
    verdict = Grade(False, "tool_infra", 0.25)  # the user's words, not ours
    assert verdict.is_trained and reward_of(verdict) == 0.25
    failed = Grade(False, "", 0.0, "ValueError", "ValueError: x")
    assert not failed.is_trained
    with pytest.raises(ValueError, match="drop the trajectory"):
        reward_of(failed)


def test_equal_rewards_give_exact_zeros():
    for scale in ("none", "std"):
        assert group_advantages([[1.0] * 4, [-1.0] * 3, [0.1] * 7], scale) == [[0.0] * 4, [0.0] * 3, [0.0] * 7]


def test_advantages_are_the_distance_to_the_group_mean_over_its_deviation():
    assert group_advantages([[1.0, -1.0, -1.0, -1.0], [1.0, 1.0]], "none") == [[1.5, -0.5, -0.5, -0.5], [0.0, 0.0]]
    expected = [math.sqrt(3), *[-1 / math.sqrt(3)] * 3]
    assert group_advantages([[1.0, -1.0, -1.0, -1.0]], "std")[0] == pytest.approx(expected)


@pytest.mark.parametrize("group", [[], [1.0], [1.0, math.nan], [math.inf, 1.0]])
def test_a_group_that_has_no_advantage_is_refused(group):
    with pytest.raises(ValueError):
        group_advantages([[1.0, -1.0], group], "none")


def test_an_unknown_scale_is_refused():
    with pytest.raises(ValueError, match=r"reward\.scale='mean'"):
        group_advantages([[1.0, -1.0]], "mean")


@given(st.lists(st.floats(-1e100, 1e100), min_size=2, max_size=9), st.sampled_from(["none", "std"]))
@settings(max_examples=300, deadline=None)
def test_advantages_are_finite_centred_and_ordered_like_the_rewards(rewards, scale):
    values = group_advantages([rewards], scale)[0]
    assert all(map(math.isfinite, values))
    assert abs(math.fsum(values)) <= 1e-12 * len(values) * max(1e-300, *map(abs, values))
    assert [b >= a for a in values for b in values] == [
        y - x >= 0 or values[j] == values[i] for i, x in enumerate(rewards) for j, y in enumerate(rewards)
    ]


def record(prompt, sample, stop=StopReason.ANSWERED):
    return RolloutRecord(
        prompt_index=prompt, sample_index=sample, policy_step=0, token_ids=(1, 2), sampled=(False, True),
        logprobs=(0.0, -0.5), turns=(Turn(start=1, end=2, ended=True),), stop=stop,
    )  # fmt: skip


def test_scoring_drops_sandbox_failures_and_compares_within_the_prompt():
    right, wrong = Grade(True, Reason.CORRECT), Grade(False, Reason.NO_BOX)
    infra = Grade(False, Reason.TOOL_INFRA)
    records = [record(p, s) for s in range(3) for p in range(3)]
    grades = [right, infra, wrong, wrong, infra, infra, wrong, right, wrong]
    scored = score(records, grades, config())
    assert [(s.record.prompt_index, s.record.sample_index) for s in scored] == [
        (0, 0), (2, 0), (0, 1), (0, 2), (1, 2), (2, 2),
    ]  # fmt: skip
    assert [s.reward for s in scored] == [1.0, -1.0, -1.0, -1.0, 1.0, -1.0]
    assert [s.advantage for s in scored] == pytest.approx([4 / 3, 0, -2 / 3, -2 / 3, 0, 0])
    assert scored[4].advantage == 0.0, "a sample left alone has nothing to be compared with"
    assert scored[0].reason == "correct"


RIGHT, WRONG = Grade(True, Reason.CORRECT), Grade(False, Reason.WRONG_VALUE)


def called(*statuses: str) -> RolloutRecord:
    calls = [
        ToolCall(name="python", arguments={"code": "1"}, status=status, text="1", seed=0, wall_s=0.0)
        for status in statuses
    ]
    return dataclasses.replace(record(0, 0), turns=(Turn(start=1, end=2, ended=True, calls=tuple(calls)),))


def test_a_call_that_ran_is_worth_something_in_a_wrong_trajectory_alone_and_only_if_asked():
    bonus = RewardConfig(tool_bonus=0.25)
    assert tool_bonus(called("error", "ok"), WRONG, bonus) == 0.25
    assert tool_bonus(called("ok"), RIGHT, bonus) == 0.0
    assert tool_bonus(called("error"), WRONG, bonus) == 0.0
    assert tool_bonus(called(), WRONG, bonus) == 0.0
    assert tool_bonus(called("ok"), WRONG, RewardConfig()) == 0.0


def test_shaped_rewards_enter_the_advantages_of_their_trajectories():
    records = [called("ok"), called("ok"), called("error")]
    grades = [WRONG, Grade(False, Reason.TOOL_INFRA), WRONG]
    scored = score(records, grades, config(bonus=0.25))
    assert [s.reward for s in scored] == [-0.75, -1.0]
    assert [s.advantage for s in scored] == [0.125, -0.125]


def config(buffer: int = 0, scale: str = "none", bonus: float = 0.0):
    return parse_config({
        "model": {"path": "m"}, "data": {"path": "d"}, "loss": {"overlong_buffer": buffer},
        "reward": {"scale": scale, "tool_bonus": bonus},
        "rollout": {"context_length": 20, "max_new_tokens": 10, "trajectories_per_step": 8}})  # fmt: skip


@pytest.mark.parametrize(
    ("spans", "penalty"),
    [
        ("PAAAA", 0.0),  # 6 tokens of its turn left
        ("PAAAAAA", 0.0),  # 4: exactly the buffer
        ("PAAAAAAA", -0.25),  # 3 of the 10 of a turn
        ("PAAAAAAAAAA", -1.0),  # cut by the turn's tokens
        ("PAAAAOOOOOOOOOAAA", -0.25),  # 17 of 20 in the context
        ("PAAAAOOOOOOOOOAAAAAA", -1.0),  # the context is full
    ],
)
def test_the_penalty_falls_linearly_over_the_last_tokens_of_either_budget(spans, penalty):
    assert overlong_penalty(spelled(spans), config(4).rollout, 4) == penalty


@pytest.mark.parametrize(
    ("text", "replacement"),
    [("return -min(", "return min("), ("buffer - room", "room - buffer"), ("room = min(", "room = max(")],
)
def test_a_changed_term_of_the_penalty_is_noticed(text, replacement):
    changed = mutant(reward, text, replacement).overlong_penalty
    trajectories = ("PAAAA", "PAAAAAAA", "PAAAAOOOOOOOOOAAA")
    assert [changed(spelled(s), config(4).rollout, 4) for s in trajectories] != [0.0, -0.25, -0.25]


def test_the_penalty_shapes_the_advantages_and_leaves_the_rewards():
    records = [spelled("PAAAA", sample=0), spelled("PAAAAAAAAAA", sample=1)]
    shaped = score(records, [RIGHT, RIGHT], config(4))
    assert [s.reward for s in shaped] == [1.0, 1.0]
    assert [s.advantage for s in shaped] == [0.5, -0.5]
    assert [s.advantage for s in score(records, [RIGHT, RIGHT], config(4, "std"))] == [1.0, -1.0]


def test_without_a_buffer_there_is_no_penalty():
    records = [spelled("PAAAA", sample=0), spelled("PAAAAAAAAAA", sample=1)]
    assert [s.advantage for s in score(records, [RIGHT, RIGHT], config(0))] == [0.0, 0.0]
    assert overlong_penalty(records[1], config(4).rollout, 0) == 0.0


def test_a_sample_alone_keeps_advantage_zero_whatever_its_penalty():
    [alone] = score([spelled("PAAAAAAAAAA")], [RIGHT], config(4))
    assert (alone.reward, alone.advantage) == (1.0, 0.0)


NUMBERS = st.one_of(
    st.integers(-(10**9), 10**9).map(lambda n: (str(n), Fraction(n))),
    st.integers(-(10**9), 10**9).map(lambda n: (f"{n:,}", Fraction(n))),
    st.tuples(st.integers(-999, 999), st.integers(1, 99)).map(
        lambda f: (f"\\dfrac{{{f[0]}}}{{{f[1]}}}", Fraction(*f))
    ),
    st.tuples(st.integers(0, 999), st.integers(1, 99)).map(lambda f: (f"-{f[0]}/{f[1]}", -Fraction(*f))),
    st.decimals(-1000, 1000, places=3).map(lambda d: (str(d), Fraction(d))),
)


@given(NUMBERS, NUMBERS)
@settings(max_examples=500, deadline=None)
def test_two_numbers_are_equal_exactly_when_their_values_are(one, other):
    assert grade(f"\\boxed{{{one[0]}}}", other[0]).correct is (one[1] == other[1])
    assert grade(f"\\boxed{{ $\\text{{{one[0]}}}.$ }}", one[0]).correct


PIECES = [
    "\\boxed{",
    "\\boxed",
    "}",
    "{",
    "\\",
    "\\{",
    "\\text{",
    "\\frac",
    "42",
    "1,234",
    ".",
    "$",
    "-",
    "\u2212",
    "~",
]
PIECES += [
    "<think>",
    "</think>",
    "<tool_call>",
    "<|im_end|>",
    "<|im_start|>assistant\n",
    "\0",
    "\ud800",
    " ",
    "\n",
    "x",
]


def box_by_hand(text):
    """Content of the box that counts, character by character; None where there is none or a call follows."""
    for cut in ("<|im_end|>", "<|endoftext|>", "<|im_start|>"):
        head, separator, rest = text.rpartition("<|im_start|>assistant")
        text = head + separator + rest.split(cut)[0]
    said = text.split("<|im_start|>assistant")[-1].split("</think>")[-1].split("<think>")[0]
    if "<tool_call>" in said:
        return None
    starts = [i + 6 for i in range(len(said)) if said.startswith("\\boxed", i)]
    opened = [i for i in starts if said[i:].lstrip().startswith("{")]
    if not opened:
        return None
    content, depth, escaped = "", 1, False
    for char in said[opened[-1] :].lstrip()[1:]:
        depth += 0 if escaped else {"{": 1, "}": -1}.get(char, 0)
        escaped = char == "\\" and not escaped
        if depth == 0:
            return content
        content += char
    return None


def assert_graded_by_the_box_that_counts(text, answer):
    verdict, content = grade(text, answer), box_by_hand(text)
    found = {Reason.CORRECT, Reason.WRONG_VALUE, Reason.EMPTY_BOX}
    assert (verdict.reason in found) is (content is not None), (text, verdict)
    assert verdict.correct is (verdict.reason is Reason.CORRECT)
    if content is not None:
        assert verdict == grade("\\boxed{" + content + "}", answer) or "\\boxed" in content
    return verdict


@given(st.lists(st.sampled_from(PIECES), max_size=30).map("".join), st.sampled_from(["42", "1234", "x", "\\frac12"]))
@settings(max_examples=500, deadline=None)
def test_any_text_is_graded_by_the_box_that_counts(text, answer):
    assert_graded_by_the_box_that_counts(text, answer)


@pytest.mark.slow
def test_a_hundred_thousand_fuzzed_boxes_are_graded_without_an_exception():
    draw = random.Random(0)
    texts = [case["text"] for case in HANDED]
    pieces = [*PIECES, *"0123456789{}\\,./-+ $", "\\dfrac", "\\!", "{,}", "\\boxed{42}", "</think>\n"]
    rights = 0
    for _ in range(100_000):
        if draw.random() < 0.5:
            text = "".join(draw.choices(pieces, k=draw.randrange(40)))
        else:
            text = draw.choice(texts)
            for _ in range(draw.randrange(4)):
                at = draw.randrange(len(text) + 1)
                text = text[:at] + draw.choice(pieces) + text[at + draw.randrange(3) :]
        case = draw.choice(HANDED)
        rights += assert_graded_by_the_box_that_counts(text, case["answer"]).correct
    assert rights > 1000, "the fuzz must reach right answers too"
