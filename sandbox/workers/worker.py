"""One worker process: answers calls of user tools, one at a time, until its socket ends.

Forked by template.py, which has imported the user's file. Invariants: an exception of the tool is an answer; nothing
that the tool prints or closes reaches the trainer; the text is cut here, so an answer has a bounded size. Limits in
time are the broker's, which kills this process and its group. Left out: any confinement. User tools are trusted code.
"""

from __future__ import annotations

import glob
import json
import os
import random
import resource
import signal
import socket
import sys
import time
from typing import Any

from sandbox.parent import render, wire


def to_text(value: object) -> str:
    """What the model reads of a return value: a string as it is, else JSON, else str()."""
    if isinstance(value, str):
        return str(value)
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        return str(value)


def describe(error: BaseException) -> str:
    """Type and message of the tool's own exception, without a traceback or a path of ours."""
    name = type(error).__name__
    try:
        message = str(error)
    except BaseException:
        message = ""
    return f"{name}: {message}" if message else name


class Worker:
    """Serves the tools of one file; `target` is None for a shared worker, or the class of a set with state."""

    def __init__(self, functions: list[Any], index: int, stateful: bool, max_chars: int):
        self._target = functions[index] if stateful else None
        self._functions = functions
        self._max_chars = max_chars
        self._problem: dict[str, Any] = {}
        self._instance: Any = None

    def serve(self, sock: socket.socket) -> None:
        """Until the broker closes the socket."""
        frames = wire.FrameReader()
        while data := sock.recv(1 << 16):
            for header, payload in frames.feed(data):
                if header["op"] == "problem":
                    self._problem = json.loads(payload)
                elif header["op"] == "close":
                    self._close()
                    return
                else:
                    answer, text = self._answer(header, payload)
                    sock.sendall(wire.pack(answer, text))

    def _answer(self, header: dict[str, Any], payload: bytes) -> tuple[dict[str, Any], bytes]:
        started = time.process_time()
        status, error_type = "ok", ""
        try:
            arguments = json.loads(payload)
            seed(header["seed"])
            text = to_text(self._function(header)(**arguments))
        except MemoryError as error:
            status, error_type = "out_of_memory", "MemoryError"
            text = describe(error) if error.args else "MemoryError: the tool used too much memory"
        except BaseException as error:
            status, error_type, text = "error", type(error).__name__, describe(error)
        finally:
            sys.settrace(None)
            sys.setprofile(None)
            signal.alarm(0)
        shown, truncated = render.shorten([render.clean(text.encode("utf-8", "surrogatepass"))], self._max_chars)
        lost = status == "out_of_memory" or (self._target is None and _left_something())
        answer = {
            "op": "answer", "status": status, "error_type": error_type, "truncated": truncated,
            "cpu_s": time.process_time() - started, "lost": lost,
        }  # fmt: skip
        return answer, (shown or "(no output)").encode("utf-8", "backslashreplace")

    def _function(self, header: dict[str, Any]) -> Any:
        if self._target is None:
            return self._functions[header["index"]]
        if self._instance is None:
            self._instance = self._target(self._problem)
        return getattr(self._instance, header["name"])

    def _close(self) -> None:
        close = getattr(self._instance, "close", None)
        if close is not None:
            close()


def seed(value: int) -> None:
    """Seeds `random`, and numpy where the tool uses it."""
    random.seed(value)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(value % 2**32)


def _left_something() -> bool:
    """Whether a call left threads or processes behind: then its worker is replaced."""
    if len(sys._current_frames()) > 1:
        return True
    for path in glob.glob("/proc/self/task/*/children"):
        with open(path, encoding="ascii") as file:
            if file.read():
                return True
    return False


def main(sock: socket.socket, worker: Worker, memory_mb: int) -> None:
    """Runs a worker in a forked child and ends the process; never returns."""
    try:
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(null, descriptor)
        with open("/proc/self/statm", encoding="ascii") as file:
            taken = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        limit = taken + (memory_mb << 20)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        worker.serve(sock)
    finally:
        os._exit(0)
