"""The trainer's end: starts a broker, sends it requests, resolves their futures, and replaces a broker that dies.

Invariants: every future resolves; a request goes out at most ATTEMPTS times, since a call may be what kills brokers;
no lock is held while a process starts, so that a caller never waits for that. One reader thread does all the
resolving. The broker leads a session of its own: Ctrl-C in the trainer's terminal does not reach it.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from sandbox.parent import wire

REQUESTS = 4096  # under way at once; `ask` waits beyond
ATTEMPTS = 2
SILENCE_S = 180.0  # beyond the longest time limit asked for: a broker that owes answers and is silent so long hangs
RESTARTS_IN_A_ROW = 3
_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_BOOT = "import sys; sys.path.insert(0, {root!r}); from {package} import broker; broker.main({fd})"

Finish = Callable[[dict[str, Any], bytes], Any]  # answer header and payload to the future's result


class StartError(RuntimeError):
    """No broker can be started; the message says why."""


class _Request:
    def __init__(self, frame: bytes, finish: Finish):
        self.frame = frame
        self.finish = finish
        self.future: Future = Future()
        self.future.set_running_or_notify_cancel()
        self.attempts = 0


class Link:
    """A running broker and the requests under way. Thread-safe."""

    def __init__(
        self, settings: dict[str, Any], environment: dict[str, str], infra: dict[str, Any],
        package: str = "sandbox.parent",
    ):  # fmt: skip
        """Waits until the broker serves. `infra` is the answer to a request that is given up; `package` holds the
        broker. Raises StartError."""
        self._package = package
        self._settings = settings
        self._environment = environment
        self._infra = infra
        self._lock = threading.RLock()  # a future's callback may ask again
        self._room = threading.BoundedSemaphore(REQUESTS)
        self._requests: dict[int, _Request] = {}
        self._numbers = 0
        self._up = False  # requests can be sent
        self._ended = ""  # why no more can be served: closed, or broken
        self._patience_s = SILENCE_S
        self.restarts = 0
        self._scratch = tempfile.TemporaryDirectory(prefix="python-tool-")
        os.chmod(self._scratch.name, 0o711)  # children may have a user of their own
        try:
            self.hello = self._start()
        except StartError:
            self._scratch.cleanup()
            raise
        self._up = True
        self._thread = threading.Thread(target=self._read, name="python-tool", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        """The broker's."""
        return self._process.pid

    def ask(self, header: dict[str, Any], payload: bytes, finish: Finish) -> Future:
        """Sends one request; the future gets finish(answer). Raises RuntimeError after close()."""
        self._patience_s = max(self._patience_s, SILENCE_S + header.get("timeout_s", 0.0))
        self._room.acquire()
        with self._lock:
            if self._ended == "closed":
                self._room.release()
                raise RuntimeError("the tool is closed")
            self._numbers += 1
            request = _Request(wire.pack(header | {"id": self._numbers}, payload), finish)
            self._requests[self._numbers] = request
            if self._up:
                self._send(request)
            elif self._ended:
                self._give_up([self._numbers])
        return request.future

    def close(self) -> None:
        """Ends the broker and everything under it; requests under way resolve as given up. Idempotent."""
        with self._lock:
            if self._ended == "closed":
                return
            self._ended = "closed"
            self._up = False
            with contextlib.suppress(OSError):  # it is being replaced right now
                self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._stop()
        self._scratch.cleanup()

    def _send(self, request: _Request) -> None:
        request.attempts += 1
        self._outbox += request.frame
        self._flush()

    def _flush(self) -> None:
        """Sends what the socket takes. It holds more than one request, so an answer comes and the rest goes then."""
        # On a broken socket the reader thread sees the end too, and sends what is under way to the next broker.
        with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            del self._outbox[: self._socket.send(self._outbox, socket.MSG_DONTWAIT)]

    def _start(self) -> dict[str, Any]:
        """Starts a broker and returns its hello once it serves. Raises StartError."""
        self._socket, theirs = socket.socketpair()
        settings = self._settings | {"scratch": self._scratch.name}
        with theirs:
            boot = _BOOT.format(root=_ROOT, package=self._package, fd=theirs.fileno())
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-B", "-c", boot, json.dumps(settings)],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=self._environment,
                pass_fds=(theirs.fileno(),), start_new_session=True,
            )  # fmt: skip
        self._frames = wire.FrameReader()
        self._outbox = bytearray()  # requests that the socket has not taken yet
        while data := self._receive():
            for header, _ in self._frames.feed(data):
                if header["op"] == "hello":
                    return header["hello"]
                self._stop()
                raise StartError(header["error"])
        self._stop()
        raise StartError("the sandbox's broker ended while it started; its words are on stderr")

    def _stop(self) -> None:
        self._socket.close()
        try:
            self._process.wait(2.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _receive(self) -> bytes:
        try:
            return self._socket.recv(1 << 18)
        except ConnectionResetError:
            return b""

    def _read(self) -> None:
        while True:
            self._wait()
            data = self._receive()
            for header, payload in self._frames.feed(data):
                if header["op"] == "answer":
                    self._resolve(header, payload)
            if self._outbox:
                with self._lock:
                    self._flush()
            if not data and not self._replace():
                return

    def _wait(self) -> None:
        """Until the broker says something or ends; one that hangs is ended."""
        poll = select.poll()  # select() ends at descriptor 1023
        poll.register(self._socket, select.POLLIN)
        owed = 0
        while not poll.poll(1000 * self._patience_s):
            if owed:
                self._process.kill()
            owed = len(self._requests)

    def _resolve(self, header: dict[str, Any], payload: bytes) -> None:
        request = self._requests.pop(header["id"])
        self._room.release()
        request.future.set_result(request.finish(header, payload))

    def _replace(self) -> bool:
        """The broker is gone: starts another and sends it what is under way. False when no more can be served."""
        with self._lock:
            self._up = False
        self._stop()
        for name in os.listdir(self._scratch.name):
            shutil.rmtree(os.path.join(self._scratch.name, name), ignore_errors=True)
        for _ in range(RESTARTS_IN_A_ROW):
            if self._ended:
                break
            self.restarts += 1
            with contextlib.suppress(StartError):
                self._start()
                if self._resume():
                    return True
                self._stop()
        with self._lock:
            self._ended = self._ended or "broken"
            self._give_up(list(self._requests))
        return False

    def _resume(self) -> bool:
        """Sends the new broker what is under way; False when the link was closed meanwhile."""
        with self._lock:
            if self._ended:
                return False
            self._give_up([number for number, one in self._requests.items() if one.attempts >= ATTEMPTS])
            for request in self._requests.values():
                self._send(request)
            self._up = True
        return True

    def _give_up(self, numbers: list[int]) -> None:
        for number in numbers:
            self._resolve(self._infra | {"id": number}, b"")
