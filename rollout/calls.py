"""A turn's tool calls while they run, and what the record keeps of each."""

from __future__ import annotations

import concurrent.futures
import hashlib
import time
from dataclasses import dataclass, field
from typing import Any

from rollout.chat.toolcall import Call, CallError
from rollout.episode import Episode
from rollout.records import ToolCall
from rollout.scheduler import Sequence


@dataclass(slots=True)
class OpenTurn:
    """A turn whose calls are running. Items keep the order in which the model wrote them."""

    episode: Episode
    slot: Sequence
    ended: bool
    calls: list[tuple[Call | CallError, int]]  # with the seed of each
    futures: list[concurrent.futures.Future[Any] | None]  # None for a call that cannot be read
    submitted: float = field(default_factory=time.perf_counter)

    def is_done(self) -> bool:
        return all(future is None or future.done() for future in self.futures)


def call_seed(key: tuple[int, int], turn: int, call: int) -> int:
    """The seed of numpy and random in a tool call: a function of the trajectory, so that a replay sees the same."""
    digest = hashlib.blake2b(f"{key[0]} {key[1]} {turn} {call}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")


def tool_call(item: Call | CallError, seed: int, future: concurrent.futures.Future[Any] | None) -> ToolCall:
    if isinstance(item, CallError) or future is None:
        return ToolCall(name="", code="", status="bad_call", text=str(item), seed=seed, wall_s=0.0)
    result, code = future.result(), item.arguments["code"]
    return ToolCall(
        name=item.name, code=code, status=result.status, text=result.text, seed=seed, wall_s=result.wall_s
    )  # fmt: skip
