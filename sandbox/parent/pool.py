"""The children that are kept ready, and the zygote behind them: refilled, recycled, replaced when it dies.

Invariants: a child's call is in flight exactly while its state is "running"; a zygote that is lost takes all its
children with it, and their calls go back to the broker; a new zygote serves before an old one stops. One zygote serves
all cores: forking is a small part of what a call costs.
"""

from __future__ import annotations

import os
import selectors
import signal
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from sandbox import control
from sandbox.parent.fork_server import Child, Outcome, ZygoteProcess

FORKS_AT_ONCE = 4  # orders under way, so that a zygote answers a kill soon
RECYCLE_GROWTH = 1.2  # of the zygote's resident memory
_MEMORY_CHECK_CALLS = 256
_START_S = 30.0  # a child that is not ready by then shows that its zygote hangs
FORK_PAUSE_S = 0.1  # times the number of children in a row that died before they were ready
_PRELOAD_S = 120.0
_RESPAWN_S = (0.0, 0.1, 0.5, 2.0, 5.0)  # pauses after the first, second, ... failure in a row
MAX_FAILURES = 12  # in a row; then the broker gives up

_VERDICT_TYPES = {"timeout": "Timeout", "output_limit": "OutputLimit", "disk_limit": "DiskLimit"}
_FORGED: Outcome = ("crash", False, 0, 0.0, "it wrote on the tool's own channel")


class Pool:
    """Keeps `spares` children ready on one zygote."""

    def __init__(
        self, selector: selectors.BaseSelector, config: dict[str, Any],
        on_outcome: Callable[[Child], None], on_lost: Callable[[Any, bool], None],
    ):  # fmt: skip
        """`on_outcome(child)`: its call's outcome is known. `on_lost(call, shielded)`: its zygote is gone."""
        self._selector = selector
        self._config = config
        self._on_outcome = on_outcome
        self._on_lost = on_lost
        self._zygotes: list[ZygoteProcess] = []
        self._numbers = 0
        self._ready: deque[Child] = deque()  # of the current zygote
        self._respawn_at = self._fork_at = 0.0
        self.current: ZygoteProcess | None = None  # the one that forks; it has said hello
        self.failures = 0  # in a row
        self.error = ""  # of the last failure
        self.started = 0  # zygotes, all told

    def take(self) -> Child | None:
        """A spare to run a call on, or None when none is ready."""
        if not self._ready:
            return None
        child = self._ready.popleft()
        child.state = "running"
        child.zygote.served += 1
        return child

    def spares(self) -> int:
        return len(self._ready)

    def retire(self, child: Child) -> None:
        """Ends a child whose call is answered."""
        self._unwatch(child)
        if child.state != "dead":
            child.state = "dying"
            child.zygote.kill(child)

    def tend(self, busy: bool, now: float) -> float:
        """Respawns, recycles and refills; returns in how many seconds it wants to be called again."""
        pause = 60.0
        if len(self._zygotes) < 1 or (self._zygotes[-1] is self.current and self._is_worn(self.current)):
            pause = self._respawn_at - now
            if pause <= 0:
                self._spawn()
                pause = 60.0
        newest = self._zygotes[-1] if self._zygotes else None
        if newest is not None and newest.hello is None and now - newest.born > _PRELOAD_S:
            self.lose(newest, f"the fork server did not start within {_PRELOAD_S:g} s; shorten tool.preload")
        current = self.current
        if current is not None and now < self._fork_at:
            pause = min(pause, self._fork_at - now)
        elif current is not None:
            goal = self._config["low_water"] if busy else self._config["spares"]
            while current.starting < FORKS_AT_ONCE and len(self._ready) + current.starting < goal:
                self._fork(current, now)
            if current.starting and now - current.last_fork > _START_S:
                self.lose(current, "a child did not become ready")
        return pause

    def _fork(self, zygote: ZygoteProcess, now: float) -> None:
        self._numbers += 1
        child = zygote.fork(self._numbers)
        zygote.starting += 1
        zygote.last_fork = now
        self._selector.register(child.control, selectors.EVENT_READ, (self._heard, child))
        child.watched = True

    def _is_worn(self, zygote: ZygoteProcess) -> bool:
        if zygote.served >= self._config["recycle_calls"]:
            return True
        if zygote.served < zygote.next_memory_check:
            return False
        zygote.next_memory_check = zygote.served + _MEMORY_CHECK_CALLS
        return zygote.resident_bytes() > RECYCLE_GROWTH * zygote.first_resident_bytes > 0

    def _spawn(self) -> None:
        zygote = ZygoteProcess(self._config["zygote"])
        self.started += 1
        self._zygotes.append(zygote)
        self._selector.register(zygote.socket, selectors.EVENT_READ, (self._heard_zygote, zygote))

    def _heard_zygote(self, zygote: ZygoteProcess) -> None:
        if zygote not in self._zygotes:
            return  # lost in the same round of events
        deaths = zygote.read()
        if deaths is None or (zygote.hello and "error" in zygote.hello):
            self.lose(zygote, (zygote.hello or {}).get("error", "the fork server died"))
            return
        if zygote.hello is not None and zygote is self._zygotes[-1] and zygote is not self.current:
            self._succeed(zygote)
        for number, status, cpu_s, peak_bytes in deaths:
            child = zygote.children.pop(number, None)
            if child is not None:
                big = peak_bytes - zygote.first_resident_bytes > self._config["zygote"]["memory_mb"] << 18  # a quarter
                self._bury(child, status, cpu_s, big)
        if zygote is not self.current and zygote.hello is not None and not zygote.children:
            self._drop(zygote)

    def _succeed(self, zygote: ZygoteProcess) -> None:
        """A new zygote is ready: it forks from now on, and the one before it ends with its last call."""
        old, self.current = self.current, zygote
        zygote.next_memory_check = _MEMORY_CHECK_CALLS
        zygote.first_resident_bytes = zygote.resident_bytes()
        for child in self._ready:
            child.state = "dying"
            child.zygote.kill(child)
        self._ready.clear()
        if old is not None and not old.children:
            self._drop(old)

    def _heard(self, child: Child) -> None:
        if not child.watched:
            return  # it was buried in the same round of events
        data = child.receive()
        if not data:
            self._unwatch(child)  # it is dead, which the zygote reports, or closed its end: then the clock runs on
        elif child.state == "starting" and data == control.READY:
            child.zygote.starting -= 1
            self.failures = 0
            if child.zygote is self.current:
                child.state = "spare"
                self._ready.append(child)
            else:
                self.retire(child)
        elif child.state == "running" and not child.verdict:
            child.outcome = control.unpack_outcome(data) or _FORGED
            self._on_outcome(child)

    def _bury(self, child: Child, status: int, cpu_s: float, big: bool) -> None:
        state, child.state = child.state, "dead"
        if state == "starting":
            child.zygote.starting -= 1
            self.failures += 1
            self._fork_at = time.monotonic() + FORK_PAUSE_S * self.failures
            child.err.drain(1 << 16)
            words = child.err.pieces()[0].decode("utf-8", "replace").strip()[-500:]
            self.error = f"a child died at start: {words or 'without a word'}"
        elif state == "spare":
            self._ready.remove(child)
        elif state == "running":
            data = child.receive() if child.watched and not child.verdict else b""
            child.outcome = (control.unpack_outcome(data) or _FORGED) if data else _obituary(child, status, cpu_s, big)
            self._on_outcome(child)
        self._unwatch(child)
        child.close()

    def _unwatch(self, child: Child) -> None:
        if child.watched:
            self._selector.unregister(child.control)
            child.watched = False

    def lose(self, zygote: ZygoteProcess, why: str) -> None:
        """Ends a zygote that is dead or no longer obeys."""
        if zygote not in self._zygotes:
            return
        self.error = why
        shielded = bool(zygote.hello and zygote.hello.get("shielded"))
        calls = [child.call for child in zygote.children.values() if child.state == "running"]
        self._drop(zygote)
        self._respawn_at = time.monotonic() + _RESPAWN_S[min(self.failures, len(_RESPAWN_S) - 1)]
        self.failures += 1
        for call in calls:
            self._on_lost(call, shielded)

    def _drop(self, zygote: ZygoteProcess, patience_s: float = 0.0) -> None:
        self._zygotes.remove(zygote)
        self._selector.unregister(zygote.socket)
        for child in zygote.children.values():
            self._unwatch(child)
        if zygote is self.current:
            self.current = None
            self._ready.clear()
        zygote.stop(patience_s)

    def stop(self) -> None:
        for zygote in list(self._zygotes):
            self._drop(zygote, patience_s=0.5)


def _obituary(child: Child, status: int, cpu_s: float, big: bool) -> Outcome:
    """What a wait status says about a program that did not report an outcome itself.

    A SIGKILL that is not ours comes from the processor-time limit, from the kernel when memory is short (it takes the
    biggest), or from the program itself.
    """
    if child.verdict:
        verdict = "error" if child.verdict == "disk_limit" else child.verdict
        return verdict, False, 0, cpu_s, _VERDICT_TYPES[child.verdict]
    if not os.WIFSIGNALED(status):
        return "exit", False, os.WEXITSTATUS(status), cpu_s, "SystemExit"
    number = os.WTERMSIG(status)
    if number == signal.SIGKILL and cpu_s >= child.call.timeout_s:
        return "timeout", False, 0, cpu_s, "Timeout"
    if number == signal.SIGKILL and big:
        return "out_of_memory", False, 0, cpu_s, "OutOfMemory"
    return "crash", False, number, cpu_s, signal.Signals(number).name
