"""From the final assistant text to a reward: the strict box rule, reason codes, group advantages. Pure, stdlib only.

The rule: only the last `\\boxed{...}` of the last assistant message counts, outside thinking, braces matched; its
content, cleaned as `boxes.clean` says, must equal the reference: as numbers where both are (exactly, no tolerance),
else as strings. Nothing is evaluated. Every trajectory gets exactly one `Reason`, so the ledger sums to all of them.

Left out: units, percent signs, mixed numbers and algebra (strings that differ are wrong); a time limit, since
`boxes` is as good as linear in the text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from enum import StrEnum
from typing import Literal

from boxes import after_thinking, clean, closing_brace, equal, last_box, last_message
from config import RewardConfig
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
    correct: bool
    reason: Reason


def grade(response: str, answer: str | int | float) -> Grade:
    """Grades an answer by the box rule.

    response: the final assistant message, or a whole Qwen transcript, of which the last assistant message counts
    answer: the reference, as `check_answer` accepts it; one that it refuses is never matched
    """
    reference = _reference_text(answer)
    if reference is None or not clean(reference):
        return _wrong(Reason.BAD_REFERENCE)
    message = last_message(response)
    said = after_thinking(message)
    if "<tool_call>" in said:
        return _wrong(Reason.TOOL_CALL)
    begin = last_box(said)
    if begin is None:
        return _wrong(Reason.NO_BOX if last_box(message) is None else Reason.BOX_IN_THINKING)
    end = closing_brace(said, begin)
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


def is_trained(reason: Reason | StopReason) -> bool:
    """Whether the trajectory enters rewards, advantages and loss: all do, unless the sandbox itself failed."""
    return reason.value != Reason.TOOL_INFRA.value


def reward_of(verdict: Grade) -> float:
    """+1.0 for a right trajectory, -1.0 for any other. Raises ValueError for `tool_infra`, which has no reward."""
    if not is_trained(verdict.reason):
        raise ValueError(f"reason {verdict.reason.value}: the sandbox failed, not the policy; drop the trajectory")
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


def shaping(record: RolloutRecord, verdict: Grade, config: RewardConfig) -> float:
    """What is added to the +1 or -1 of a trajectory, 0 as shipped: reward.tool_bonus for a wrong one that ran a call
    without an error. It stays below 1, so no sign ever changes. (Length is penalised, if at all, by the loss section.)
    """
    used = any(call.status == "ok" for turn in record.turns for call in turn.calls)
    return config.tool_bonus if used and not verdict.correct else 0.0


def score(
    records: Sequence[RolloutRecord], grades: Sequence[Grade], scale: Literal["none", "std"],
    shaped: Sequence[float] | None = None,
) -> list[Scored]:  # fmt: skip
    """Rewards and advantages of all records that are trained on, in their order; groups share a `prompt_index`.

    shaped: `shaping` of each record; None adds nothing
    `tool_infra` records are dropped. Where that leaves one sample of a prompt, its advantage is 0: there is nothing
    to compare it with.
    """
    groups: dict[int, list[int]] = {}
    for index, (record, verdict) in enumerate(zip(records, grades, strict=True)):
        if is_trained(verdict.reason):
            groups.setdefault(record.prompt_index, []).append(index)
    trained = (index for members in groups.values() for index in members)
    reward = {index: reward_of(grades[index]) + (shaped[index] if shaped else 0.0) for index in trained}
    advantage: dict[int, float] = {}
    for members in groups.values():
        rewards = [reward[index] for index in members]
        values = group_advantages([rewards], scale)[0] if len(members) > 1 else [0.0]
        advantage.update(zip(members, values, strict=True))
    return [
        Scored(record=records[i], reward=reward[i], reason=grades[i].reason.value, advantage=advantage[i])
        for i in sorted(advantage)
    ]


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
    return None
