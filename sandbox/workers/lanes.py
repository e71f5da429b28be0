"""What the broker keeps: calls, worker processes, and the lanes on which calls wait for workers. Mechanism only."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from typing import Any

from sandbox.parent import wire

_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_BOOT = (
    "import sys; sys.path.append({root!r}); from sandbox.workers import template; template.main({fd}, {settings!r})"
)
_GONE = (BrokenPipeError, ConnectionResetError)


class Call:
    """One call on its way."""

    __slots__ = ("arguments", "deadline", "header", "started", "submitted")

    def __init__(self, header: dict[str, Any], arguments: bytes, now: float):
        self.header, self.arguments = header, arguments
        self.submitted, self.started, self.deadline = now, 0.0, 0.0


class Lane:
    """Calls in order and the workers that may take them: a pool for functions, one worker for a set with state."""

    def __init__(self, template: Template, index: int, limit: int, problem: bytes | None):
        self.template, self.index, self.limit, self.problem = template, index, limit, problem
        self.queue: deque[Call] = deque()
        self.workers: set[Worker] = set()
        self.idle: list[Worker] = []
        self.died_idle = False  # the state went while no call ran: the next call's answer is an error

    @property
    def stateful(self) -> bool:
        return self.problem is not None


class Worker:
    """The broker's end of one worker process."""

    def __init__(self, lane: Lane, number: int):
        self.lane, self.number = lane, number
        self.template = lane.template
        self.socket, theirs = socket.socketpair()
        self.frames = wire.FrameReader()
        self.outbox = bytearray()
        self.call: Call | None = None
        self.pid = 0  # known once the template says so
        self.ended_at = 0.0  # its socket ended, or it was killed; how it ended is not known yet
        order = {"op": "fork", "number": number, "index": lane.index, "stateful": lane.stateful}
        with theirs, contextlib.suppress(*_GONE):
            socket.send_fds(lane.template.socket, [wire.pack(order)], [theirs.fileno()])
        self.socket.setblocking(False)
        if lane.problem is not None:
            self.outbox += wire.pack({"op": "problem"}, lane.problem)

    def flush(self) -> bool:
        """Sends what the socket takes; True where nothing is left."""
        with contextlib.suppress(BlockingIOError, *_GONE):
            while self.outbox:
                del self.outbox[: self.socket.send(self.outbox)]
        return not self.outbox

    def kill(self) -> None:
        """Ends the process and its group; one that does not exist yet finds its socket closed."""
        if self.pid > 0:
            for kill in (os.killpg, os.kill):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    kill(self.pid, signal.SIGKILL)


class Template:
    """The template process of one file, as the broker sees it."""

    def __init__(self, settings: dict[str, Any]):
        self.settings = settings
        self.socket, theirs = socket.socketpair()
        with theirs:
            boot = _BOOT.format(root=_ROOT, fd=theirs.fileno(), settings=settings)
            self.process = subprocess.Popen(
                [sys.executable, "-c", boot], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),), start_new_session=True,
            )  # fmt: skip
        self.frames = wire.FrameReader()
        self.hello: list[dict[str, Any]] = []
        self.ready = False  # it forks
        self.error = ""

    def read(self) -> list[dict[str, Any]] | None:
        """Its reports (forked, dead); None when it is gone. Sets hello and error."""
        try:
            data = self.socket.recv(1 << 16)
        except ConnectionResetError:
            data = b""
        if not data:
            return None
        reports = []
        for header, payload in self.frames.feed(data):
            if header["op"] == "hello":
                self.hello, self.ready = json.loads(payload), True
            elif header["op"] == "failed":
                self.error = header["error"]
            else:
                reports.append(header)
        return reports

    def stop(self) -> None:
        self.socket.close()
        try:
            self.process.wait(1.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
