"""One trajectory while it grows: its tokens, its turns and their tool calls, and what ends it. Plain Python, no torch.

Sampled ids are kept verbatim; after a turn only a suffix is appended. `finish` turns the whole into a `RolloutRecord`.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from rollout.chat.toolcall import Call, CallError
from rollout.records import RolloutRecord, SamplingConfig, StopReason, ToolCall, Turn
from rollout.scheduler import LiveSequence


class TurnEnd(Enum):
    """How the open turn stands after a draw."""

    OPEN = "open"
    ENDED = "ended"  # the policy drew a stop token
    CUT = "cut"  # sampling.max_new_tokens reached
    FULL = "full"  # sampling.context_length reached


class Episode:
    """`tokens` may end in one placeholder: `expect` adds it for a draw that is on its way, `draw` fills it in."""

    def __init__(
        self, prompt_ids: Sequence[int], *, prompt_index: int, sample_index: int, policy_step: int,
        sampling: SamplingConfig,
    ):  # fmt: skip
        """Raises ValueError where the prompt leaves no room for a token."""
        if not 0 < len(prompt_ids) < sampling.context_length:
            raise ValueError(
                f"prompt {prompt_index} has {len(prompt_ids)} tokens; "
                f"it must have at least 1 and fewer than context_length={sampling.context_length}"
            )
        self.prompt_index, self.sample_index, self.policy_step = prompt_index, sample_index, policy_step
        self.tokens = list(prompt_ids)  # [T]
        self.known = len(prompt_ids)  # tokens that are not placeholders
        self._logprobs = [0.0] * len(prompt_ids)  # [T]
        self._turns: list[Turn] = []
        self._turn_start = len(prompt_ids)
        self._sampling = sampling
        self.tool_seconds = 0.0  # of all calls so far

    def expect(self, placeholder: int) -> None:
        """A draw is on its way; the next step is planned as if it were there."""
        self.tokens.append(placeholder)

    def draw(self, token: int, logprob: float, stop_ids: Collection[int]) -> TurnEnd:
        """The next sampled token of the open turn; it takes the place of the oldest placeholder."""
        self.tokens[self.known : self.known + 1] = [token]
        self.known += 1
        # A certain token has log-prob -0.0 or, by rounding of the log-sum-exp, a hair above 0.
        self._logprobs.append(min(logprob, 0.0))
        if token in stop_ids:
            return TurnEnd.ENDED
        if self.known >= self._sampling.context_length:
            return TurnEnd.FULL
        if self.known - self._turn_start >= self.max_turn_tokens:
            return TurnEnd.CUT
        return TurnEnd.OPEN

    @property
    def max_turn_tokens(self) -> int:
        return self._sampling.max_new_tokens

    @property
    def turn_ids(self) -> list[int]:
        """Sampled ids of the open turn."""
        return self.tokens[self._turn_start :]

    @property
    def is_last_turn(self) -> bool:
        return len(self._turns) + 1 >= self._sampling.max_turns

    @property
    def turn_index(self) -> int:
        return len(self._turns)

    def stop_drawing(self) -> None:
        """The turn is over: what was expected after its last token is never part of the trajectory."""
        del self.tokens[self.known :]

    def close_turn(self, *, ended: bool, calls: tuple[ToolCall, ...] = ()) -> None:
        self.tool_seconds += sum(call.wall_s for call in calls)
        self._turns.append(Turn(start=self._turn_start, end=len(self.tokens), ended=ended, calls=calls))

    def has_room_for(self, suffix: Sequence[int]) -> bool:
        """Whether at least one token could be sampled after the suffix."""
        return len(self.tokens) + len(suffix) < self._sampling.context_length

    def append_suffix(self, suffix: Sequence[int]) -> None:
        """Tool results and the next assistant header: never sampled, never trained. Opens the next turn."""
        self.tokens.extend(suffix)
        self._logprobs.extend([0.0] * len(suffix))
        self._turn_start = self.known = len(self.tokens)

    def finish(self, stop: StopReason, routes: bytes = b"") -> RolloutRecord:
        """Call after the last turn is closed."""
        sampled = [False] * len(self.tokens)
        for turn in self._turns:
            sampled[turn.start : turn.end] = [True] * (turn.end - turn.start)
        return RolloutRecord(
            prompt_index=self.prompt_index,
            sample_index=self.sample_index,
            policy_step=self.policy_step,
            token_ids=tuple(self.tokens),
            sampled=tuple(sampled),
            logprobs=tuple(self._logprobs),
            turns=tuple(self._turns),
            stop=stop,
            routes=routes,
        )


@dataclass(frozen=True, slots=True)
class Limits:
    """What the tool calls of one trajectory may take, so that no turn holds a rollout for long."""

    calls: int = 16  # of one turn
    seconds: float = 300.0  # of all calls so far; a turn that begins below it runs

    def refusal(self, number: int, spent: float) -> str | None:
        """The answer to call `number` (from 0) of a turn that begins after `spent` seconds; None where it may run."""
        if number >= self.calls:
            return f"Not run: a turn runs at most {self.calls} calls."
        if spent >= self.seconds:
            return f"Not run: the calls before it took {self.seconds:g} s together, all that they may."
        return None


@dataclass(slots=True, eq=False)
class OpenTurn:
    """A turn whose calls are running. `calls` keeps the order in which the model wrote them."""

    episode: Episode
    sequence: LiveSequence
    ended: bool
    calls: list[tuple[Call | CallError, int]]  # with the seed of each
    futures: list[concurrent.futures.Future[Any] | str]  # in place of one: the answer to a call that is not run
    submitted: float = field(default_factory=time.perf_counter)

    def is_done(self) -> bool:
        return all(isinstance(future, str) or future.done() for future in self.futures)


def call_seed(key: tuple[int, int], turn: int, call: int) -> int:
    """The seed of numpy and random in a tool call: a function of the trajectory, so that a replay sees the same."""
    digest = hashlib.blake2b(f"{key[0]} {key[1]} {turn} {call}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")


def tool_call(item: Call | CallError, seed: int, found: concurrent.futures.Future[Any] | str) -> ToolCall:
    if isinstance(item, CallError):
        return ToolCall(name="", arguments={}, status="bad_call", text=str(item), seed=seed, wall_s=0.0)
    name, arguments = item.name, item.arguments
    if isinstance(found, str):
        return ToolCall(name=name, arguments=arguments, status="over_limit", text=found, seed=seed, wall_s=0.0)
    result = found.result()
    return ToolCall(
        name=name, arguments=arguments, status=result.status, text=result.text, seed=seed, wall_s=result.wall_s
    )  # fmt: skip
