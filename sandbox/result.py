"""The protocol of tools: sets, sessions, and how one call ended. Standard library only."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class ToolResult:
    """How one call ended.

    status: ok, error, timeout, out_of_memory, output_limit, crash, exit, refused, infra (the sandbox failed, not the
    program: drop the trajectory). text: what the model is shown.
    """

    status: str
    text: str
    stdout: str
    stderr: str
    value_shown: bool  # a bare last expression was printed
    error_type: str  # the exception's class name; Timeout, OutputLimit, SIGSEGV, ...; empty for ok
    wall_s: float  # from hand-over to the child
    cpu_s: float
    queue_s: float  # waiting before that; not charged to the program
    truncated: bool  # the model was shown less than the program wrote


class ToolSession(Protocol):
    """The tools of one trajectory."""

    def call(self, name: str, arguments: dict[str, Any], seed: int) -> Future[ToolResult]: ...

    def close(self) -> None:
        """Ends the trajectory's state; calls under way resolve."""


class ToolSet(Protocol):
    """Some tools under one roof."""

    @property
    def schema(self) -> list[dict[str, Any]]: ...

    def open(self, problem: dict[str, Any]) -> ToolSession: ...

    def close(self) -> None: ...


def at_once(status: str, text: str, error_type: str) -> Future[ToolResult]:
    """A call that is answered without being made."""
    future: Future[ToolResult] = Future()
    future.set_result(ToolResult(status, text, "", "", False, error_type, 0.0, 0.0, 0.0, False))
    return future
