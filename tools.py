"""The Python tool as the trainer sees it: code in, a future with text and a status out.

Invariants: every future resolves, whatever dies; `submit` never waits for a program; a failure of the sandbox itself
has status "infra" and is never text for the model nor a reward. Start it before CUDA is touched. The processes behind
it live in sandbox/.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import config
from sandbox import limits, render, wire

QUEUE_CALLS = 4096  # calls under way at once; submit waits beyond
_BOOT = "import sys; sys.path.insert(0, {root!r}); from sandbox import broker; broker.main({fd})"
_ROOT = os.path.dirname(os.path.abspath(__file__))


class SandboxError(RuntimeError):
    """The sandbox cannot start, or cannot give what tool.require demands. One line: what and the mend."""


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


def tool_schema(settings: config.ToolConfig) -> dict[str, Any]:
    """The tool's description for the chat template."""
    how = "Runs a Python program and returns what it prints. Use print() to see a value."
    if settings.show_last_value:
        how = "Runs a Python program and returns what it prints and the value of a last line that is an expression."
    code = {"type": "string", "description": "The program to run."}
    parameters = {"type": "object", "properties": {"code": code}, "required": ["code"]}
    return {"type": "function", "function": {"name": "python", "description": how, "parameters": parameters}}


class _Pending:
    __slots__ = ("attempts", "frame", "future")

    def __init__(self, frame: bytes, future: Future):
        self.frame = frame
        self.future = future
        self.attempts = 0


class PythonTool:
    """Runs programs in single-use, kernel-isolated processes. Thread-safe; close() it, or leave that to exit."""

    def __init__(self, settings: config.ToolConfig):
        self._settings = settings
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._room = threading.BoundedSemaphore(QUEUE_CALLS)
        self._pending: dict[int, _Pending] = {}
        self._numbers = 0
        self._counts: Counter[str] = Counter()
        self._restarts = 0
        self._closed = False
        self.report = self._start()
        self._thread = threading.Thread(target=self._read_answers, name="python-tool", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def submit(self, code: str, seed: int = 0, timeout: float | None = None) -> Future[ToolResult]:
        """Queues one program; `timeout` (seconds) replaces tool.timeout_seconds. RuntimeError after close()."""
        future: Future[ToolResult] = Future()
        future.set_running_or_notify_cancel()
        raw = code.encode("utf-8", "surrogatepass")
        if len(raw) > limits.CODE_BYTES:
            words = f"Refused: the program is longer than {limits.CODE_BYTES} bytes"
            self._counts["refused"] += 1
            future.set_result(ToolResult("refused", words, "", "", False, "Refused", 0.0, 0.0, 0.0, False))
            return future
        self._room.acquire()
        with self._lock:
            if self._closed:
                self._room.release()
                raise RuntimeError("the Python tool is closed")
            self._numbers += 1
            header = {"op": "call", "id": self._numbers, "seed": seed % 2**64,
                      "timeout_s": timeout or self._settings.timeout_seconds}  # fmt: skip
            pending = self._pending[self._numbers] = _Pending(wire.pack(header, raw), future)
            self._send(pending.frame)
        return future

    def __call__(self, code: str) -> str:
        """Runs one program and returns the text for the model. Raises SandboxError when the sandbox itself failed."""
        result = self.submit(code).result()
        if result.status == "infra":
            raise SandboxError(f"the Python tool failed twice on one call; {self.report}")
        return result.text

    def stats(self) -> dict[str, Any]:
        """Calls by status, restarts, and the broker's queue, running calls and spares."""
        future: Future[dict[str, Any]] = Future()
        with self._lock:
            if self._closed:
                return {"calls": dict(self._counts), "broker_restarts": self._restarts}
            self._numbers += 1
            frame = wire.pack({"op": "stats", "id": self._numbers})
            self._pending[self._numbers] = _Pending(frame, future)
            self._room.acquire()
            self._send(frame)
        inner = future.result()
        return {
            "calls": dict(self._counts),
            "broker_restarts": self._restarts,
            "broker_pid": self._process.pid,
        } | inner

    def close(self) -> None:
        """Ends every process of the tool; calls under way resolve as infra. Idempotent."""
        with self._lock:
            if self._closed or os.getpid() != self._owner:
                return
            self._closed = True
            self._socket.shutdown(socket.SHUT_RDWR)
        atexit.unregister(self.close)
        self._thread.join()
        self._stop_process()

    def _send(self, frame: bytes) -> None:
        # On a broken socket the reader thread sees the end too, starts a new broker and sends what is pending.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._socket.sendall(frame)

    def _start(self) -> str:
        """Starts a broker and waits until it can serve; returns the report line. Raises SandboxError."""
        self._socket, theirs = socket.socketpair()
        with theirs:
            boot = _BOOT.format(root=_ROOT, fd=theirs.fileno())
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-B", "-c", boot, json.dumps(self._broker_config())],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=limits.ENVIRONMENT,
                pass_fds=(theirs.fileno(),),
            )  # fmt: skip
        self._frames = wire.FrameReader()
        while True:
            data = self._socket.recv(1 << 18)
            for header, _ in self._frames.feed(data):
                if header["op"] == "hello":
                    return str(header["hello"])
                self._stop_process()
                raise SandboxError(header["error"])
            if not data:
                self._stop_process()
                raise SandboxError("the sandbox's broker died at start; its words are above")

    def _broker_config(self) -> dict[str, Any]:
        settings = self._settings
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        running = settings.max_running or max(2, cores - 2)
        spares = min(max(32, 8 * running), 128)
        paths = [path for path in sys.path if path and os.path.basename(path) != os.path.basename(_ROOT)]
        zygote = {"paths": paths, "preload": settings.preload, "memory_mb": settings.memory_mb, "tasks": spares + 64}
        return {"max_running": running, "spares": spares, "low_water": running + 2, "zygote": zygote,
                "show_last_value": settings.show_last_value,
                "import_filter": settings.import_filter == "on"}  # fmt: skip

    def _stop_process(self) -> None:
        self._socket.close()
        try:
            self._process.wait(2.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _read_answers(self) -> None:
        while True:
            try:
                data = self._socket.recv(1 << 18)
            except (ConnectionResetError, OSError):
                data = b""
            if data:
                for header, payload in self._frames.feed(data):
                    self._resolve(header, payload)
            elif not self._revive():
                return

    def _resolve(self, header: dict[str, Any], payload: bytes) -> None:
        pending = self._pending.pop(header.pop("id"))
        self._room.release()
        if header["op"] == "stats":
            pending.future.set_result(header)
            return
        status = header["status"]
        self._counts[status] += 1
        pending.future.set_result(self._result(header, payload))

    def _result(self, header: dict[str, Any], payload: bytes) -> ToolResult:
        pieces, start = [], 0
        for size in header["sizes"]:
            pieces.append(payload[start : start + size])
            start += size
        shown = render.render(header, pieces, self._settings.max_output_chars)
        return ToolResult(
            header["status"], shown.text, shown.stdout, shown.stderr, header["shown"], header["error_type"],
            header["wall_s"], header["cpu_s"], header["queue_s"], shown.truncated,
        )  # fmt: skip

    def _revive(self) -> bool:
        """The broker is gone: start another and send what is pending once more, or give up when closed."""
        with self._lock:
            if self._closed:
                self._give_up(list(self._pending))
                return False
            self._restarts += 1
            self._stop_process()
            self._start()
            again = {number: pending for number, pending in self._pending.items() if pending.attempts == 0}
            self._give_up([number for number in self._pending if number not in again])
            for pending in again.values():
                pending.attempts += 1
                self._send(pending.frame)
        return True

    def _give_up(self, numbers: list[int]) -> None:
        header = {"op": "answer", "status": "infra", "error_type": "Infra", "code": 0, "shown": False, "wall_s": 0.0,
                  "cpu_s": 0.0, "queue_s": 0.0, "timeout_s": 0.0, "cut": [0, 0], "sizes": [0, 0, 0, 0]}  # fmt: skip
        for number in numbers:
            self._resolve(header | {"id": number}, b"")
