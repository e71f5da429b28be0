"""Signals that a run obeys: SIGTERM, SIGHUP or Ctrl-C to save and end, SIGUSR1 to save and go on.

Before the first step there is nothing to save, so that a request to end ends the process at once: `Stopped` is raised
where the main thread stands, and a thread ends the process where that is inside a library and hears nothing. From the
first step on (`begin`) signals are obeyed between two steps: one reaches one process, and `Interruption.agreed` makes
all ranks act on it after the same step. A SIGUSR1 before the first step counts after it.

A second request to end ends the process at once. Under a launcher one within `FORWARDED_S` of the first is ignored:
batch systems and terminals signal every process, and the launcher forwards the signal to its ranks once more. A rank
whose torchrun dies gets a SIGTERM from the system. Under nohup SIGHUP stays ignored. Standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable
from enum import IntEnum
from types import FrameType
from typing import Any

FORWARDED_S = 5.0
START_S = 0.5  # within which the main thread hears of a request to end before the first step
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1


class Request(IntEnum):
    NONE = 0
    SAVE = 1
    STOP = 2  # save, then end with status 0


class Stopped(BaseException):
    """A request to end came before the first step. The message is a line for people."""


class Interruption:
    """Obeys signals inside its `with` block; one per process, in the main thread."""

    def __init__(self, max_minutes: float | None = None, starting: bool = False):
        """max_minutes: wall time from now after which the run ends as if by SIGTERM; None: no limit.

        starting: until `begin` a request to end raises Stopped
        """
        self._deadline = None if max_minutes is None else time.monotonic() + 60 * max_minutes
        self._request = Request.NONE
        self._asked_to_end_at: float | None = None
        self._begun = not starting
        self._over = threading.Event()  # the block has been left

    def __enter__(self) -> Interruption:
        heard = [n for n in _ENDING if n is not signal.SIGHUP or signal.getsignal(n) is not signal.SIG_IGN]
        self._before = {number: signal.signal(number, self._on_term) for number in heard}
        self._before[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, self._on_usr1)
        if "TORCHELASTIC_RUN_ID" in os.environ:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))
        # The system's part of a signal's handling writes its number here, also while the main thread is in a library.
        self._numbers, ours = os.pipe()
        os.set_blocking(ours, False)
        self._wakeup = ours, signal.set_wakeup_fd(ours, warn_on_full_buffer=False)
        threading.Thread(target=self._listen, name="signals", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        ours, before = self._wakeup
        signal.set_wakeup_fd(before)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(ours)  # which ends the thread

    def begin(self) -> None:
        """From here on a request to end waits for `agreed` or `ends`."""
        self._begun = True

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
        now, first = time.monotonic(), self._asked_to_end_at
        if first is not None:
            if now - first >= FORWARDED_S:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return
        self._request, self._asked_to_end_at = Request.STOP, now
        if "RANK" not in os.environ:
            for once in self._before.keys() - {signal.SIGUSR1}:
                signal.signal(once, signal.SIG_DFL)
        if not self._begun:
            raise Stopped(_end_before_the_first_step(number))
        _write(
            f"{signal.Signals(number).name}: the run ends when the step under way is finished and saved (--resume "
            "goes on); a second one ends it at once"
        )

    def _on_usr1(self, number: int, frame: FrameType | None) -> None:
        self._request = max(self._request, Request.SAVE)

    def _listen(self) -> None:
        with os.fdopen(self._numbers, "rb", buffering=0) as numbers:
            while number := numbers.read(1):
                ending = number[0] in _ENDING and not self._begun
                if ending and not self._over.wait(START_S) and not self._begun:
                    _write(_end_before_the_first_step(number[0]))
                    os._exit(0)


def _end_before_the_first_step(number: int) -> str:
    return f"{signal.Signals(number).name}: ended before the first step; there is nothing new to save"


def _write(line: str) -> None:
    with contextlib.suppress(OSError):  # not print: the signal may have come inside one
        os.write(1, f"{line}\n".encode())
