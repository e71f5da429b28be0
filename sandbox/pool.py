"""Zygotes and the spare children they keep ready, as the broker sees them.

A slot is one single-use child: starting -> spare (it said ready) -> running (it holds a call) -> dying. Invariants: a
slot's call is in flight exactly while its state is running; a zygote that is lost takes all its slots with it, and
their calls come back to the broker.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from sandbox import control, limits
from sandbox.streams import Stream

FORKS_AT_ONCE = 4  # orders under way, so that a zygote answers a kill soon
RESPAWN_DELAYS_S = (0.0, 0.1, 0.5, 2.0, 5.0)
Outcome = tuple[str, bool, int, float, str]  # status, value shown, exit code or signal, CPU seconds, error type
_FORGED: Outcome = ("crash", False, 0, 0.0, "it wrote on the tool's own channel")
_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_BOOT = "import sys; sys.path.insert(0, {root!r}); from sandbox import zygote; zygote.main({fd}, {config!r})"


class Slot:
    """One child and the broker's ends of its descriptors."""

    __slots__ = ("call", "control", "err", "number", "out", "outcome", "state", "verdict", "watched", "zygote")

    def __init__(self, number: int, zygote: Zygote, sock: socket.socket, out: int, err: int):
        self.number = number
        self.zygote = zygote
        self.control = sock
        self.out = Stream(out)
        self.err = Stream(err)
        self.state = "starting"
        self.call: Any = None
        self.outcome: Outcome | None = None
        self.verdict = ""  # why the broker killed it: timeout, output_limit
        self.watched = False

    def close(self) -> None:
        self.control.close()
        os.close(self.out.fd)
        os.close(self.err.fd)


class Zygote:
    """A running fork server: its process, its socket, its slots."""

    def __init__(self, config: dict[str, Any]):
        self.socket, theirs = socket.socketpair()
        with theirs:
            boot = _BOOT.format(root=_ROOT, fd=theirs.fileno(), config=config)
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-B", "-c", boot],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=limits.ENVIRONMENT,
                pass_fds=(theirs.fileno(),),
            )  # fmt: skip
        self.slots: dict[int, Slot] = {}
        self.hello: dict[str, Any] | None = None
        self.served = 0
        self._buffer = bytearray()

    def read(self) -> list[tuple[int, int, float, int]] | None:
        """The deaths it reports (slot, wait status, CPU seconds, peak KiB); None when it is gone. Sets hello."""
        try:
            data = self.socket.recv(1 << 16)
        except ConnectionResetError:
            data = b""
        if not data:
            return None
        self._buffer += data
        if self.hello is None:
            line, newline, rest = self._buffer.partition(b"\n")
            if not newline:
                return []
            self.hello = json.loads(line)
            self._buffer = rest
        size = control.DEATH.size
        whole = len(self._buffer) // size * size
        deaths = list(control.DEATH.iter_unpack(self._buffer[:whole]))
        del self._buffer[:whole]
        return deaths

    def fork(self, number: int) -> Slot:
        """Orders a child; it becomes a spare when it says ready."""
        mine, theirs = socket.socketpair()
        out, their_out = os.pipe()
        err, their_err = os.pipe()
        fds = array.array("i", [theirs.fileno(), their_out, their_err])
        slot = Slot(number, self, mine, out, err)
        self.slots[number] = slot
        order = control.ORDER.pack(control.FORK, number)
        with contextlib.suppress(
            BrokenPipeError, ConnectionResetError
        ):  # its end is read next, and takes the slot along
            self.socket.sendmsg([order], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
        theirs.close()
        os.close(their_out)
        os.close(their_err)
        mine.setblocking(False)
        os.set_blocking(out, False)
        os.set_blocking(err, False)
        return slot

    def kill(self, slot: Slot) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.socket.sendall(control.ORDER.pack(control.KILL, slot.number))

    def stop(self) -> None:
        """Kills the process and with it every child; closes what belongs to it."""
        self.socket.close()
        self.process.kill()
        self.process.wait()
        for slot in self.slots.values():
            slot.close()
        self.slots.clear()


class Pool:
    """Keeps `spares` children ready on one zygote and replaces the zygote when it dies."""

    def __init__(
        self, selector: selectors.BaseSelector, config: dict[str, Any], spares: int, low_water: int,
        on_outcome: Callable[[Slot], None], on_lost: Callable[[Any], None],
    ):  # fmt: skip
        self._selector = selector
        self._config = config
        self._spares = spares
        self._low_water = low_water
        self._on_outcome = on_outcome
        self._on_lost = on_lost
        self._numbers = 0
        self._ready: deque[Slot] = deque()
        self._starting = 0
        self._failures = 0
        self._respawn_at = 0.0
        self.zygote: Zygote | None = None
        self.restarts = -1
        self.error = ""

    def take(self) -> Slot | None:
        """A spare to run a call on, or None when none is ready."""
        return self._ready.popleft() if self._ready else None

    def spares(self) -> int:
        return len(self._ready)

    def tend(self, busy: bool) -> float:
        """Respawns and refills; returns in how many seconds it wants to be called again."""
        now = time.monotonic()
        if self.zygote is None:
            if now < self._respawn_at:
                return self._respawn_at - now
            self._spawn()
        zygote = self.zygote
        assert zygote is not None
        if zygote.hello is not None:
            goal = self._low_water if busy else self._spares
            while self._starting < FORKS_AT_ONCE and len(self._ready) + self._starting < goal:
                self._numbers += 1
                slot = zygote.fork(self._numbers)
                self._starting += 1
                self._selector.register(slot.control, selectors.EVENT_READ, (self._control, slot))
                slot.watched = True
        return 60.0

    def _spawn(self) -> None:
        self.zygote = Zygote(self._config)
        self.restarts += 1
        self._selector.register(self.zygote.socket, selectors.EVENT_READ, (self._zygote_event, self.zygote))

    def _zygote_event(self, zygote: Zygote) -> None:
        deaths = zygote.read()
        if deaths is None or (zygote.hello and "error" in zygote.hello):
            self.error = (zygote.hello or {}).get("error", "the fork server died")
            self._lost(zygote)
            return
        for number, status, cpu_s, _ in deaths:
            slot = zygote.slots.pop(number, None)
            if slot is not None:
                self._buried(slot, status, cpu_s)

    def _buried(self, slot: Slot, status: int, cpu_s: float) -> None:
        if slot.state == "starting":
            self._starting -= 1
        elif slot.state == "spare":
            self._ready.remove(slot)
        elif slot.state == "running":
            slot.outcome = self._read_outcome(slot) or self._obituary(slot, status, cpu_s)
            self._on_outcome(slot)
        self._unwatch(slot)
        slot.close()

    def _obituary(self, slot: Slot, status: int, cpu_s: float) -> Outcome:
        """What a wait status says about a program that did not report an outcome itself."""
        if slot.verdict:
            return slot.verdict, False, 0, cpu_s, {"timeout": "Timeout", "output_limit": "OutputLimit"}[slot.verdict]
        if os.WIFSIGNALED(status):
            number = os.WTERMSIG(status)
            if number == signal.SIGXCPU:
                return "timeout", False, 0, cpu_s, "Timeout"
            return "crash", False, number, cpu_s, signal.Signals(number).name
        return "exit", False, os.WEXITSTATUS(status), cpu_s, "SystemExit"

    def _control(self, slot: Slot) -> None:
        if not slot.watched:
            return  # it was buried by an event of the same round
        data = self._receive(slot)
        if not data:
            self._unwatch(slot)  # it is dead, which the zygote reports, or closed its end: then the clock runs on
        elif slot.state == "starting" and data == control.READY:
            slot.state = "spare"
            self._starting -= 1
            self._ready.append(slot)
            self._failures = 0
        elif slot.state == "running":
            slot.outcome = control.unpack_outcome(data) or _FORGED
            self._on_outcome(slot)

    def _read_outcome(self, slot: Slot) -> Outcome | None:
        """The outcome of a child that is dead already, if it wrote one and it has not been read."""
        data = self._receive(slot) if slot.watched and not slot.verdict else b""
        return control.unpack_outcome(data) or _FORGED if data else None

    def _receive(self, slot: Slot) -> bytes:
        try:
            return slot.control.recv(1024)
        except (BlockingIOError, ConnectionResetError):
            return b""

    def retire(self, slot: Slot) -> None:
        """Ends a child whose call is answered."""
        slot.state = "dying"
        self._unwatch(slot)
        slot.zygote.kill(slot)

    def _unwatch(self, slot: Slot) -> None:
        if slot.watched:
            self._selector.unregister(slot.control)
            slot.watched = False

    def _lost(self, zygote: Zygote) -> None:
        self._selector.unregister(zygote.socket)
        calls = [slot.call for slot in zygote.slots.values() if slot.state == "running"]
        for slot in zygote.slots.values():
            self._unwatch(slot)
        zygote.stop()
        self._ready.clear()
        self._starting = 0
        self.zygote = None
        delay = RESPAWN_DELAYS_S[min(self._failures, len(RESPAWN_DELAYS_S) - 1)]
        self._failures += 1
        self._respawn_at = time.monotonic() + delay
        for call in calls:
            self._on_lost(call)

    def stop(self) -> None:
        if self.zygote is not None:
            self.zygote.stop()
