"""The user's reward at start-up: its worker processes, its grader, and what `check` finds out about it."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from config import Config, UserError
from configs.schema import located_spec
from reward import after_thinking, reward_of
from rollout.records import RolloutRecord

if TYPE_CHECKING:
    from evaluation.grading import Grader
    from rollout.chat.formats import Chat
    from sandbox.workers.rewards import Scorer
    from startup.building import Parts

GOLD_ROWS = 100
Found = tuple[str, Literal["ok", "note", "FAIL"], str]  # a `startup.check.Finding`


@contextlib.contextmanager
def started_reward(config: Config, beside: Path | None = None) -> Iterator[Scorer | None]:
    """The worker processes of reward.function; None without one. Start them before CUDA is touched.

    beside: a run's folder, whose copy of the file serves where the file itself is gone
    Raises ConfigError for a file or a name that cannot be used.
    """
    if not config.reward.function:
        yield None
        return
    from sandbox.parent.link import StartError
    from sandbox.workers.rewards import Scorer
    from tools import calls_at_once

    try:
        scorer = Scorer(
            located_spec(config.reward.function, beside or Path.cwd()), Path.cwd(),
            timeout_s=config.reward.timeout_seconds, memory_mb=config.tool.memory_mb,
            max_running=calls_at_once(config.tool),
        )  # fmt: skip
    except StartError as error:
        raise UserError(str(error)) from error
    try:
        yield scorer
    finally:
        scorer.close()


def build_grader(chat: Chat, scorer: Scorer | None) -> Grader:
    """Grades by the box rule, or with `scorer` by reward.function."""
    from evaluation.grading import BoxGrader, UserGrader

    return UserGrader(scorer, chat.answer) if scorer else BoxGrader(chat.answer)


def check_gold(parts: Parts) -> Found:
    """With reward.function: the texts of `gold`, sent through the tokenizer, must be correct."""
    if parts.scorer is None or not parts.scorer.has_gold:
        return ("gold", "ok", "reward.function has no gold(problem) beside it; nothing to score")
    rows = parts.data.problems[:GOLD_ROWS]
    given = []
    for problem in rows:
        try:
            ids = parts.chat.answer_ids(parts.scorer.gold(dict(problem.row)))
        except RuntimeError as error:
            return ("gold", "FAIL", f"line {problem.line}: gold: {error}; fix the function")
        text = after_thinking(parts.chat.answer(ids))
        turns: list[dict[str, Any]] = [{"text": parts.chat.answer(ids), "calls": []}]
        shown = {"final_text": text, "stop": "answered", "turns": turns, "sampled_tokens": len(ids)}
        found = parts.scorer.score(shown, dict(problem.row)).result()
        if found.error:
            return ("gold", "FAIL", f"line {problem.line}: reward.function: {found.message}; fix the function")
        if not found.correct:
            said = f"line {problem.line}: gold {text!r:.80} gets {found.reward:g}, {found.reason!r}, not correct"
            return ("gold", "note", f"{said}; without calls, as check scores it")
        given.append(found.reward)
    return ("gold", "ok", f"the first {len(rows)} gold texts get {min(given):g} to {max(given):g}")


def check_rewards(parts: Parts, records: Sequence[RolloutRecord]) -> list[Found]:
    """With reward.function: what it gives the sampled trajectories."""
    if parts.scorer is None:
        return []
    parts.grader.expect(parts.data.problems)
    grades = parts.grader.grades(records)
    parts.grader.expect(())
    failed = [grade.message for grade in grades if grade.error]
    if failed:
        text = f"reward.function fails on {len(failed)} of {len(grades)} sampled trajectories: {failed[0]}"
        return [("reward", "FAIL", f"{text}; fix the function")]
    counts = Counter(f"{reward_of(grade):g} {grade.reason}" for grade in grades if grade.is_trained)
    text = f"{len(grades)} sampled trajectories get " + ", ".join(f"{n} x {what}" for what, n in counts.items())
    if len({grade.reward for grade in grades}) == 1:
        return [("reward", "note", f"{text}: all one reward, which teaches nothing if it stays so")]
    return [("reward", "ok", text)]
