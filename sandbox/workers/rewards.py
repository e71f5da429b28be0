"""The user's reward in worker processes: what a worker runs, and the trainer's end of it.

A reward is `score(trajectory, problem)` of the user's file, with an optional `gold(problem)` beside it. Both get plain
data: `trajectory` as attributes, `problem` as the data row. Invariants: every future resolves; whatever the function
does (raises, hangs, exits, eats memory, returns something else) is an `Outcome` with `error`, never a reward. Like
tools, rewards are trusted code: limits, no sandbox. `random` and numpy are seeded alike for every call.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sandbox.parent import wire
from sandbox.parent.link import Link, StartError
from sandbox.workers.client import THREADS, find, read

MAX_REASON = 200  # characters
_ANSWER_CHARS = 1 << 20  # of a worker; a reason or a gold text is shorter
_INFRA = {"op": "answer", "status": "infra", "error_type": "WorkerLost"}
_FIX = "return a finite float, (float, reason) or (float, reason, correct)"


class BadReward(ValueError):
    """What `score` returned is no reward."""


class NotFinite(BadReward):
    """`score` returned nan or an infinity."""


def worker_functions(score: Callable[..., Any], gold: Callable[..., Any] | None) -> list[Any]:
    """What a worker of a reward file serves: index 0 scores, index 1 gives the gold text."""

    def run_score(trajectory: dict[str, Any], problem: dict[str, Any]) -> str:
        return json.dumps(outcome(score(as_attributes(trajectory), problem)))

    def run_gold(problem: dict[str, Any]) -> str:
        if gold is None:
            raise BadReward("no function gold")
        text = gold(problem)
        if not isinstance(text, str):
            raise BadReward(f"gold returned {text!r:.80}; return the final text as a string")
        return json.dumps(text)

    return [run_score, run_gold]


def as_attributes(trajectory: dict[str, Any]) -> SimpleNamespace:
    """`trajectory.turns[i].calls[j].name` and so on; arguments stay a dict."""
    turns = [
        SimpleNamespace(text=turn["text"], calls=[SimpleNamespace(**call) for call in turn["calls"]])
        for turn in trajectory["turns"]
    ]
    return SimpleNamespace(**trajectory | {"turns": turns})


def outcome(value: Any) -> tuple[float, str, bool]:
    """Reward, reason and correct of what `score` returned. Raises BadReward."""
    parts = value if isinstance(value, tuple) else (value,)
    if not 1 <= len(parts) <= 3 or isinstance(parts[0], str):
        raise BadReward(f"score returned {value!r:.80}; {_FIX}")
    try:
        reward = float(parts[0])
    except (TypeError, ValueError) as error:
        raise BadReward(f"score returned {value!r:.80}; {_FIX}") from error
    if not math.isfinite(reward):
        raise NotFinite(f"score returned {reward}; {_FIX}")
    correct = bool(parts[2]) if len(parts) == 3 else reward > 0
    default = "correct" if correct else "wrong"
    reason = str(parts[1]) if len(parts) > 1 and parts[1] is not None else default
    return reward, " ".join(reason.split())[:MAX_REASON] or default, correct


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one call of `score`, or why there is none."""

    reward: float = 0.0
    reason: str = ""
    correct: bool = False
    error: str = ""  # type of the exception, Timeout, OutOfMemory, ...; empty: the reward counts
    message: str = ""  # of the error


class Scorer:
    """A running pool of workers for one reward function. Thread-safe; close() it."""

    def __init__(self, spec: str, beside: Path, *, timeout_s: float, memory_mb: int, max_running: int):
        """Waits until the file is imported. Raises StartError: one line, with the spec and the fix."""
        path, name = find(spec, beside, "reward.function")
        self.file = read(path, "reward.function")
        self._timeout_s = timeout_s
        one = {"path": str(path), "names": [name], "reward": True, "max_output_chars": _ANSWER_CHARS,
               "memory_mb": memory_mb}  # fmt: skip
        settings = {"max_running": max_running, "timeout_s": timeout_s, "files": [one]}
        environment = dict.fromkeys(THREADS, "1") | {"MALLOC_ARENA_MAX": "2"} | dict(os.environ)
        try:
            self._link = Link(settings, environment, _INFRA, "sandbox.workers")
        except StartError as error:
            raise StartError(f"reward.function={spec!r}: {error}") from error
        self.has_gold = bool(self._link.hello["files"][0][0]["gold"])

    def score(self, trajectory: dict[str, Any], problem: dict[str, Any]) -> Future[Outcome]:
        """trajectory: `final_text`, `stop`, `sampled_tokens` and `turns`, as JSON holds them."""
        return self._ask(0, {"trajectory": trajectory, "problem": problem})

    def gold(self, problem: dict[str, Any]) -> str:
        """The user's gold text; raises RuntimeError with one line where `gold` fails. Waits."""
        found = self._ask(1, {"problem": problem}).result()
        if found.error:
            raise RuntimeError(found.message)
        return found.reason

    def close(self) -> None:
        """Ends every process; calls under way resolve as errors. Idempotent."""
        self._link.close()

    def _ask(self, index: int, arguments: dict[str, Any]) -> Future[Outcome]:
        header = {"op": "call", "file": 0, "index": index, "name": "", "stateful": False, "session": -1, "seed": 0,
                  "timeout_s": self._timeout_s}  # fmt: skip
        try:
            return self._link.ask(header, json.dumps(arguments).encode(), _finish)
        except wire.WireError as error:
            future: Future[Outcome] = Future()
            future.set_result(Outcome(error="TooLong", message=str(error)))
            return future


def _finish(header: dict[str, Any], payload: bytes) -> Outcome:
    if header["status"] == "ok":
        value = json.loads(payload)
        return Outcome(reason=value) if isinstance(value, str) else Outcome(*value)
    kind = header["error_type"] or header["status"]
    return Outcome(error=kind, message=" ".join(payload.decode("utf-8", "replace").split()) or kind)
