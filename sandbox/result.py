"""How one tool call ended, whichever tool it was of. Standard library only."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass


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


def at_once(status: str, text: str, error_type: str) -> Future[ToolResult]:
    """A call that is answered without being made."""
    future: Future[ToolResult] = Future()
    future.set_result(ToolResult(status, text, "", "", False, error_type, 0.0, 0.0, 0.0, False))
    return future
