"""Signals that a run obeys between two steps: SIGTERM or Ctrl-C to save and end, SIGUSR1 to save.

A signal reaches one process; `Interruption.agreed` makes all ranks act on it after the same step. A signal during the
building of the model counts too: an end before the first step (`Interruption.ends`), a save after it. A second SIGTERM
or Ctrl-C ends the process at once. Under a launcher one within `FORWARDED_S` of the first is ignored: batch systems
and terminals signal every process, and the launcher forwards the signal to its ranks once more. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from enum import IntEnum
from types import FrameType
from typing import Any

FORWARDED_S = 5.0


class Request(IntEnum):
    NONE = 0
    SAVE = 1
    STOP = 2  # save, then end with status 0


class Interruption:
    """Obeys signals inside its `with` block; one per process, in the main thread."""

    def __init__(self, max_minutes: float | None = None):
        """max_minutes: wall time from now after which the run ends as if by SIGTERM; None: no limit."""
        self._deadline = None if max_minutes is None else time.monotonic() + 60 * max_minutes
        self._request = Request.NONE
        self._asked_to_end_at: float | None = None

    def __enter__(self) -> Interruption:
        self._before = {
            signal.SIGTERM: signal.signal(signal.SIGTERM, self._on_term),
            signal.SIGINT: signal.signal(signal.SIGINT, self._on_term),
            signal.SIGUSR1: signal.signal(signal.SIGUSR1, self._on_usr1),
        }
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def agreed(self, gather: Callable[[Any], list[Any]]) -> Request:
        """The strongest request that any rank has seen since the last call. Collective."""
        seen, self._request = self._seen(), Request.NONE
        return max(gather(seen))

    def ends(self, gather: Callable[[Any], list[Any]]) -> bool:
        """Whether any rank was asked to end; every request stays for `agreed`. Collective."""
        return max(gather(self._seen())) is Request.STOP

    def _seen(self) -> Request:
        overdue = self._deadline is not None and time.monotonic() >= self._deadline
        return Request.STOP if overdue else self._request

    def _on_term(self, number: int, frame: FrameType | None) -> None:
        self._request = Request.STOP
        now, first = time.monotonic(), self._asked_to_end_at
        if first is not None:
            if now - first >= FORWARDED_S:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return
        self._asked_to_end_at = now
        if "RANK" not in os.environ:
            for once in (signal.SIGTERM, signal.SIGINT):
                signal.signal(once, signal.SIG_DFL)
        name = signal.Signals(number).name
        words = (
            f"{name}: the run ends when the step under way is finished and saved, or before the first one (--resume "
            "goes on); a second one ends it at once\n"
        )
        with contextlib.suppress(OSError):  # not print: the signal may have come inside one
            os.write(1, words.encode())

    def _on_usr1(self, number: int, frame: FrameType | None) -> None:
        self._request = max(self._request, Request.SAVE)
