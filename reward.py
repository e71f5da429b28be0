"""From the final assistant text to rewards and advantages: the box rule, reason codes, shaping, group advantages.

The rule: only the last `\\boxed{...}` of the last assistant message counts, outside thinking, braces matched; its
content, normalised by `clean`, must equal the reference: as numbers where both are (exactly, no tolerance), else as
strings. Nothing is evaluated. Every trajectory gets exactly one `Reason`, so the ledger sums to all of them.

Data passes in this order: `grade_trajectory` gives a `Grade`, `score` adds the shaping and compares within each group.
Another reward replaces the grading alone. Pure, standard library only.

Left out: units, percent signs, mixed numbers and algebra (strings that differ are wrong); a time limit, since every
step is linear in the text but the product of two fractions, which is a fast multiplication.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import MAX_EMAX, MAX_PREC, MIN_EMIN, Context, Decimal
from enum import StrEnum
from typing import Literal

from config import Config, RewardConfig, RolloutConfig
from rollout.records import RolloutRecord, Scored, StopReason


class Reason(StrEnum):
    """Why a trajectory is right or wrong. Closed; the last five are the stop reasons that leave no answer."""

    CORRECT = "correct"
    WRONG_VALUE = "wrong_value"  # the last box holds something else
    NO_BOX = "no_box"
    UNCLOSED_BOX = "unclosed_box"  # the last box never closes; an earlier one does not count
    EMPTY_BOX = "empty_box"
    BOX_IN_THINKING = "box_in_thinking"  # the only boxes are inside thinking (GPT-OSS: not in the final channel)
    TOOL_CALL = "tool_call"  # the message calls a tool, so it is no answer
    BAD_REFERENCE = "bad_reference"  # `check_answer` refuses the reference: never right
    TURN_LIMIT = "turn_limit"
    TURN_TOKENS = "turn_tokens"
    CONTEXT_FULL = "context_full"
    BAD_CALL = "bad_call"
    TOOL_INFRA = "tool_infra"  # not rewarded, not trained on


@dataclass(frozen=True, slots=True)
class Grade:
    """Of one trajectory: by the box rule, or by the user's reward.function (evaluation/grading.py)."""

    correct: bool
    reason: str  # a `Reason`; of reward.function its own words
    reward: float | None = None  # of reward.function; None: +1 or -1 by `correct`
    error: str = ""  # where reward.function failed: the exception's type; the trajectory is not trained
    message: str = ""  # of that exception

    @property
    def is_trained(self) -> bool:
        """Whether the trajectory enters rewards, advantages and loss: not where sandbox or reward.function failed."""
        return not self.error and self.reason is not Reason.TOOL_INFRA


def grade(response: str, answer: str | int | float) -> Grade:
    """Grades a final answer by the box rule.

    response: the final assistant message, or a whole Qwen transcript, of which the last assistant message counts
    answer: the reference, as `check_answer` accepts it; one that it refuses is never matched
    """
    reference = _reference_text(answer)
    if reference is None or not clean(reference):
        return _wrong(Reason.BAD_REFERENCE)
    message = _last_message(response)
    said = after_thinking(message)
    if "<tool_call>" in said:
        return _wrong(Reason.TOOL_CALL)
    begin = _last_box(said)
    if begin is None:
        return _wrong(Reason.NO_BOX if _last_box(message) is None else Reason.BOX_IN_THINKING)
    end = _closing_brace(said, begin)
    if end is None:
        return _wrong(Reason.UNCLOSED_BOX)
    content = clean(said[begin:end])
    if not content:
        return _wrong(Reason.EMPTY_BOX)
    return Grade(True, Reason.CORRECT) if equal(content, clean(reference)) else _wrong(Reason.WRONG_VALUE)


def grade_trajectory(text: str, stop: StopReason, answer: str | int | float) -> Grade:
    """Grades the text of a trajectory's final assistant turn; only one that stopped as `answered` can be right."""
    return grade(text, answer) if stop is StopReason.ANSWERED else _wrong(Reason(stop.value))


def check_answer(answer: object) -> str:
    """The reference as a string. Raises ValueError for one that no response could match; a loader adds file and line.

    Refused: empty or blank text, booleans, null, lists, infinities, and text that does not match itself in a box
    (unbalanced braces, a box inside).
    """
    text = _reference_text(answer)
    if text is None:
        raise ValueError(f"answer {answer!r:.80}: must be a non-empty string or a finite number")
    if not clean(text):
        raise ValueError(f"answer {text!r:.80}: is empty; every problem needs a reference")
    if not grade(f"\\boxed{{{text}}}", text).correct:
        raise ValueError(f"answer {text!r:.80}: does not match itself inside \\boxed{{}}; store the bare value")
    return text


def reward_of(verdict: Grade) -> float:
    """The reward of reward.function; by the box rule +1.0 for a right trajectory, -1.0 for any other.

    Raises ValueError for a trajectory that is not trained, which has no reward.
    """
    if not verdict.is_trained:
        raise ValueError(f"reason {verdict.reason}: not the policy failed; drop the trajectory")
    if verdict.reward is not None:
        return verdict.reward
    return 1.0 if verdict.correct else -1.0


def group_advantages(rewards: Sequence[Sequence[float]], scale: Literal["none", "std"]) -> list[list[float]]:
    """Advantages of samples that share a prompt, one group per inner list.

    none: reward - group mean (Dr. GRPO, Liu et al. 2025). std: that over the group's population standard deviation
    (GRPO, Shao et al. 2024), without an epsilon. Equal rewards give exact zeros in both. Raises ValueError for a group
    of fewer than two, a reward that is not finite, an unknown scale.
    """
    if scale not in ("none", "std"):
        raise ValueError(f"reward.scale={scale!r}: must be none or std")
    return [_advantages(list(group), scale) for group in rewards]


def _advantages(group: list[float], scale: str) -> list[float]:
    if len(group) < 2:
        raise ValueError(f"a group of {len(group)}: an advantage compares samples of one prompt; sample at least 2")
    if not all(map(math.isfinite, group)):
        raise ValueError(f"rewards {group}: must be finite")
    if min(group) == max(group):
        return [0.0] * len(group)
    mean = math.fsum(group) / len(group)
    centred = [reward - mean for reward in group]
    if scale == "none":
        return centred
    # Divided by the largest first, so that squares neither vanish nor overflow.
    largest = max(map(abs, centred))
    scaled = [value / largest for value in centred]
    deviation = math.sqrt(math.fsum(value * value for value in scaled) / len(scaled))
    return [value / deviation for value in scaled]


def tool_bonus(record: RolloutRecord, verdict: Grade, config: RewardConfig) -> float:
    """reward.tool_bonus for a wrong trajectory that ran a call without an error, else 0.

    It stays below 1, so no reward changes its sign.
    """
    used = any(call.status == "ok" for turn in record.turns for call in turn.calls)
    return config.tool_bonus if used and not verdict.correct else 0.0


def overlong_penalty(record: RolloutRecord, rollout: RolloutConfig, buffer: int) -> float:
    """DAPO's soft overlong punishment (Yu et al. 2025, eq. 13), between 0 and -1; 0 where the buffer is 0.

    Written with the room that was left, min over the two budgets that can cut a trajectory: the context, and the
    tokens of a turn. 0 with at least `buffer` tokens of room, falling linearly to -1 with none.
    """
    if buffer == 0:
        return 0.0
    longest = max(turn.end - turn.start for turn in record.turns)
    room = min(rollout.context_length - len(record.token_ids), rollout.max_new_tokens - longest)
    return -min(max((buffer - room) / buffer, 0.0), 1.0)


def score(records: Sequence[RolloutRecord], grades: Sequence[Grade], config: Config) -> list[Scored]:
    """Rewards and advantages of all records that are trained on, in their order; groups share a `prompt_index`.

    The recorded reward is the grade's plus the tool bonus. The overlong penalty is in the advantage alone.
    Records that are not trained (`Grade.is_trained`) are dropped. Where that leaves one sample of a prompt, its
    advantage is 0: there is nothing to compare it with.
    """
    groups: dict[int, list[int]] = {}
    reward: dict[int, float] = {}
    for index, (record, verdict) in enumerate(zip(records, grades, strict=True)):
        if verdict.is_trained:
            groups.setdefault(record.prompt_index, []).append(index)
            reward[index] = reward_of(verdict) + tool_bonus(record, verdict, config.reward)
    penalty = {i: overlong_penalty(records[i], config.rollout, config.loss.overlong_buffer) for i in reward}
    advantage: dict[int, float] = {}
    for members in groups.values():
        compared = [reward[index] + penalty[index] for index in members]
        values = group_advantages([compared], config.reward.scale)[0] if len(members) > 1 else [0.0]
        advantage.update(zip(members, values, strict=True))
    return [
        Scored(
            record=records[i], reward=reward[i], reason=str(grades[i].reason), advantage=advantage[i],
            correct=grades[i].correct,
        )
        for i in reward
    ]  # fmt: skip


def _wrong(reason: Reason) -> Grade:
    return Grade(False, reason)


def _reference_text(answer: object) -> str | None:
    if isinstance(answer, str):
        return answer
    # Through Decimal: str() refuses integers past 4,300 digits, and repr() writes large floats with an exponent.
    if isinstance(answer, int) and not isinstance(answer, bool):
        return format(Decimal(answer), "f")
    if isinstance(answer, float) and math.isfinite(answer):
        return format(Decimal(repr(answer)), "f")
    if isinstance(answer, Decimal) and answer.is_finite():
        return format(answer, "f")
    return None


# The box rule: where the last box stands, its normal form, and when two answers are equal.

_MESSAGE_END = re.compile(r"<\|im_end\|>|<\|endoftext\|>|<\|im_start\|>")
_ASSISTANT = "<|im_start|>assistant"


def _last_message(response: str) -> str:
    """The last assistant message of a transcript that begins inside an assistant message."""
    message = response.rpartition(_ASSISTANT)[2]
    end = _MESSAGE_END.search(message)
    return message[: end.start()] if end else message


def after_thinking(message: str) -> str:
    """The text outside thinking; a closing tag without an opening one ends thinking that the prompt opened."""
    return message.rpartition("</think>")[2].partition("<think>")[0]


_BOX = re.compile(r"\\boxed\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # an escaped brace is matched as a pair, so it does not count


def _last_box(text: str) -> int | None:
    """Where the content of the last box begins."""
    begin = None
    for match in _BOX.finditer(text):
        begin = match.end()
    return begin


def _closing_brace(text: str, begin: int) -> int | None:
    """Index of the brace that closes the group whose content begins at `begin`."""
    depth = 1
    for match in _BRACE.finditer(text, begin):
        if match[0] == "{":
            depth += 1
        elif match[0] == "}":
            depth -= 1
            if depth == 0:
                return match.start()
    return None


# Spacing that LaTeX sets narrower than a blank. A line break (two backslashes) is matched first, and kept.
_SPACING = re.compile(r"\\\\|\\[,!;:]|~")
_WRAPPER = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\s*\{|\\.|[{}]", re.DOTALL)
_EDGE = "$" + "".join(char for char in map(chr, range(0x3001)) if char.isspace())
_PEELS = 4  # layers of dollars, periods and braces around one answer; deeper ones are no answer


def clean(text: str) -> str:
    """The normal form of what a box or a reference holds; the steps stand in order below."""
    text = text.replace("\u2212", "-").replace("{,}", ",").replace("\\$", "$")
    text = text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    text = _SPACING.sub(lambda match: match[0] if match[0] == "\\\\" else "", text)
    return " ".join(_peel(_unwrap(text)).split())


def _unwrap(text: str) -> str:
    """Drops `\\text{...}` and its like, keeping what they hold."""
    parts: list[str] = []
    is_wrapper: list[bool] = []  # one entry per open group
    position = 0
    for match in _WRAPPER.finditer(text):
        token = match[0]
        parts.append(text[position : match.start()])
        position = match.end()
        if token.endswith("{") and token != "\\{":
            is_wrapper.append(token != "{")
            dropped = is_wrapper[-1]
        else:
            dropped = token == "}" and bool(is_wrapper) and is_wrapper.pop()
        if not dropped:
            parts.append(token)
    return "".join(parts) + text[position:]


def _peel(text: str) -> str:
    """Drops blanks and dollars at both ends, braces around the whole, and one trailing period."""
    period_left = True
    for _ in range(_PEELS):
        inner = text.strip(_EDGE)
        if period_left and inner.endswith("."):
            inner, period_left = inner[:-1].strip(_EDGE), False
        if inner.startswith("{") and _closing_brace(inner, 1) == len(inner) - 1:
            inner = inner[1:-1]
        if inner == text:
            break
        text = inner
    return text


_DIGITS = r"(?:(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
_GROUP = rf"(?:\{{\s*([+-]?{_DIGITS})\s*\}}|([0-9]))"
_NUMBER = re.compile(rf"([+-]?)\s*(?:({_DIGITS})(?:\s*/\s*([+-]?{_DIGITS}))?|\\frac\s*{_GROUP}\s*{_GROUP})")
_LOOSE_BLANK = re.compile(r" (?![0-9A-Za-z])|(?<![0-9A-Za-z]) ")
_EXACT = Context(prec=MAX_PREC, Emax=MAX_EMAX, Emin=MIN_EMIN)


def equal(one: str, other: str) -> bool:
    """Compares exactly as numbers where both are, else as strings; blanks count only between letters or digits."""
    first, second = _number(one), _number(other)
    if first is None and second is None:
        return _LOOSE_BLANK.sub("", one) == _LOOSE_BLANK.sub("", other)
    if first is None or second is None:
        return False
    return _EXACT.multiply(first[0], second[1]) == _EXACT.multiply(second[0], first[1])


def _number(text: str) -> tuple[Decimal, Decimal] | None:
    """Numerator and denominator of an integer, decimal or fraction; None for anything else.

    Decimal, not int or Fraction: both read digits in quadratic time, and int refuses more than 4,300 of them.
    """
    match = _NUMBER.fullmatch(text)
    if match is None:
        return None
    sign, plain, below, *groups = match.groups()
    top, bottom = (plain, below or "1") if plain else (groups[0] or groups[1], groups[2] or groups[3])
    numerator, denominator = (Decimal(part.replace(",", "")) for part in (top, bottom))
    if denominator == 0:
        return None
    return (_EXACT.minus(numerator) if sign == "-" else numerator), denominator


def final_answer(response: str) -> str | None:
    """The cleaned content of the last box outside thinking, of the last assistant message; None without one."""
    said = after_thinking(_last_message(response))
    begin = _last_box(said)
    end = None if begin is None else _closing_brace(said, begin)
    if begin is None or end is None or "<tool_call>" in said:
        return None
    return clean(said[begin:end]) or None
