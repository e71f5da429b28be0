"""From sampled trajectories to grades: by the box rule, or by the user's `reward.function`.

Both graders are used alike: `expect` names the problems of a rollout, `begin` may be called as trajectories finish (so
that a slow reward runs beside the rollout), `grades` gives one `Grade` a record, in order. Invariants: a trajectory in
which the sandbox failed is not shown to the user's function; one on which the function fails gets a `Grade` with
`error`, never a reward. Each trajectory is graded once, on the rank that sampled it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from config import UserError
from reward import Grade, Reason, after_thinking, grade_trajectory
from rollout.records import RolloutRecord, StopReason

MAX_FAILED = 0.01  # share of a step's trajectories
SHOWN = 300  # characters of a final text

Decode = Callable[[Sequence[int]], str]  # ids of a sampled turn to its text, thinking and calls marked: `Chat.answer`


class RewardError(UserError, RuntimeError):
    """reward.function failed too often."""


class Problem(Protocol):
    """The fields of `data.Problem` that a grader needs."""

    @property
    def answer(self) -> str: ...
    @property
    def row(self) -> Mapping[str, Any]: ...


class Scorer(Protocol):
    """What `UserGrader` needs of `sandbox.workers.rewards.Scorer`."""

    def score(self, trajectory: dict[str, Any], problem: dict[str, Any]) -> Future[Any]: ...


class Grader(Protocol):
    def expect(self, problems: Sequence[Problem]) -> None:
        """The problem of each prompt_index of the rollout that begins."""

    def begin(self, record: RolloutRecord) -> None:
        """May start to grade a record whose problem is expected."""

    def grades(self, records: Sequence[RolloutRecord]) -> list[Grade]: ...


class BoxGrader:
    """The rule of reward.py."""

    def __init__(self, decode: Decode):
        self._decode = decode
        self._problems: Sequence[Problem] = ()

    def expect(self, problems: Sequence[Problem]) -> None:
        self._problems = problems

    def begin(self, record: RolloutRecord) -> None:
        """Nothing to start: grading is fast."""

    def grades(self, records: Sequence[RolloutRecord]) -> list[Grade]:
        return [
            grade_trajectory(final_turn(r, self._decode), r.stop, self._problems[r.prompt_index].answer)
            for r in records
        ]  # fmt: skip


class UserGrader:
    """`reward.function`, called in worker processes."""

    def __init__(self, scorer: Scorer, decode: Decode):
        self._scorer, self._decode = scorer, decode
        self._problems: Sequence[Problem] = ()
        self._begun: dict[tuple[int, int], Future[Any]] = {}  # (prompt_index, sample_index)

    def expect(self, problems: Sequence[Problem]) -> None:
        self._problems, self._begun = problems, {}

    def begin(self, record: RolloutRecord) -> None:
        if record.prompt_index < len(self._problems) and record.stop is not StopReason.TOOL_INFRA:
            row = dict(self._problems[record.prompt_index].row)
            view = as_trajectory(record, self._decode)
            self._begun[record.prompt_index, record.sample_index] = self._scorer.score(view, row)

    def grades(self, records: Sequence[RolloutRecord]) -> list[Grade]:
        for record in records:
            if (record.prompt_index, record.sample_index) not in self._begun:
                self.begin(record)
        found = [self._begun.pop((r.prompt_index, r.sample_index), None) for r in records]
        return [_grade(None if future is None else future.result()) for future in found]


def _grade(outcome: Any | None) -> Grade:
    if outcome is None:
        return Grade(False, Reason.TOOL_INFRA)
    return Grade(outcome.correct, outcome.reason, outcome.reward, outcome.error, outcome.message)


def final_turn(record: RolloutRecord, decode: Decode) -> str:
    """The text of the last turn, thinking included."""
    return decode(record.token_ids[record.final_turn.start : record.final_turn.end])


def as_trajectory(record: RolloutRecord, decode: Decode) -> dict[str, Any]:
    """What reward.function reads of a trajectory, as JSON holds it. `final_text` leaves thinking out."""
    turns = [
        {
            "text": decode(record.token_ids[turn.start : turn.end]),
            "calls": [
                {"name": call.name, "arguments": call.arguments, "status": call.status, "text": call.text}
                for call in turn.calls
            ],
        }
        for turn in record.turns
    ]  # fmt: skip
    return {
        "final_text": after_thinking(final_turn(record, decode)), "stop": record.stop.value, "turns": turns,
        "sampled_tokens": record.num_sampled,
    }  # fmt: skip


def failures(
    records: Sequence[RolloutRecord], grades: Sequence[Grade], decode: Decode, step: int
) -> tuple[dict[str, int], str]:
    """How often reward.function failed in a step, by exception, and the first failure with its trajectory.

    Raises RewardError above MAX_FAILED of the records.
    """
    failed = [(record, grade) for record, grade in zip(records, grades, strict=True) if grade.error]
    counts: dict[str, int] = {}
    for _, grade in failed:
        counts[grade.error] = counts.get(grade.error, 0) + 1
    if not failed:
        return counts, ""
    record, grade = failed[0]
    text = final_turn(record, decode)
    first = (
        f"reward.function failed on step {step}, prompt {record.prompt_index}, sample {record.sample_index}: "
        f"{grade.message}; its final turn: {text[:SHOWN]!r}"
    )
    if len(failed) > MAX_FAILED * len(records):
        raise RewardError(
            f"{first}; {len(failed)} of {len(records)} trajectories of the step failed ({counts}), more than "
            f"{MAX_FAILED:.0%}; fix the function"
        )
    return counts, first
