"""The template process of one user file: imports it once, describes its tools, then forks workers on order.

Started by the broker. Speaks wire frames on one socket: it says hello (or failed), obeys `fork` orders, each with a
socket for the worker, and reports every pid and every death. When its socket ends it kills what it forked. It never
runs a tool. Left out: threads that the user's file starts at import do not exist in the workers.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import inspect
import json
import os
import re
import selectors
import signal
import socket
import sys
import types
from typing import Any

from sandbox.parent import wire
from sandbox.workers.rewards import worker_functions
from sandbox.workers.worker import Worker
from sandbox.workers.worker import main as work

_SUBREAPER = 36  # prctl: orphans of a worker become children of this process, which ends them


class SpecError(Exception):
    """A name of the file that is no tool; the message is one line."""


def load(path: str, names: list[str]) -> list[Any]:
    """The named functions and classes of a file. Raises SpecError."""
    shown = os.path.basename(path)
    sys.path.insert(0, os.path.dirname(path))
    spec = importlib.util.spec_from_file_location(os.path.splitext(shown)[0], path)
    if spec is None or spec.loader is None:
        raise SpecError(f"{shown}: is no Python file; name a .py file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        message = " ".join(str(error).split())
        raise SpecError(f"{shown}: cannot be imported: {type(error).__name__}: {message}; fix the file") from error
    found = []
    for name in names:
        one = vars(module).get(name)
        if not inspect.isclass(one) and not inspect.isfunction(one):
            known = ", ".join(key for key, value in vars(module).items() if _is_own(value, spec.name)) or "none"
            raise SpecError(f"{shown}:{name}: no such function or class; the file has {known}")
        found.append(one)
    return found


def _is_own(value: object, module: str) -> bool:
    return (inspect.isclass(value) or inspect.isfunction(value)) and value.__module__ == module


def describe(shown: str, one: Any, examples: dict[str, Any]) -> list[dict[str, Any]]:
    """The JSON schemas of a function, or of the public methods of a class. Raises SpecError.

    Takes each docstring's `Example:` section, which is no part of the description, into `examples`.
    """
    if not inspect.isclass(one):
        _take_example(one, examples)
        return [_schema(f"{shown}:{one.__name__}", one)]
    names = [name for name, value in inspect.getmembers(one, inspect.isfunction) if _is_tool(name, value)]
    if not names:
        raise SpecError(f"{shown}:{one.__name__}: no public method with a docstring; write one for each tool")
    for name in names:
        _take_example(getattr(one, name), examples)
    held = sorted(names, key=lambda name: getattr(one, name).__code__.co_firstlineno)
    return [_schema(f"{shown}:{one.__name__}.{n}", types.MethodType(getattr(one, n), object())) for n in held]


def _is_tool(name: str, value: Any) -> bool:
    return not name.startswith("_") and name != "close" and bool(value.__doc__)


def _take_example(function: Any, examples: dict[str, Any]) -> None:
    """Cuts `Example: {"argument": value}`, one JSON object, out of a docstring; other examples stay in it."""
    doc = inspect.getdoc(function) or ""
    found = re.search(r"^Examples?:[ \t]*\n?((?:.*\S.*(?:\n|$))+)", doc, re.MULTILINE)
    if not found:
        return
    try:
        arguments = json.loads(found[1])
    except ValueError:
        arguments = None
    if isinstance(arguments, dict):
        examples[function.__name__] = arguments
        function.__doc__ = (doc[: found.start()] + doc[found.end() :]).strip()


def _schema(where: str, function: Any) -> dict[str, Any]:
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise SpecError(f"{where}: is async; write a plain function")
    if not function.__doc__:
        raise SpecError(f"{where}: has no docstring; the model reads it as the tool's description")
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.annotation is inspect.Parameter.empty:
            raise SpecError(f"{where}: parameter {name!r} has no type; write {name}: str, int, ...")
    try:
        schema = importlib.import_module("transformers.utils").get_json_schema(function)
    except Exception as error:
        message = " ".join(str(error).split())
        raise SpecError(f"{where}: {message}; write a type and an Args: line for each parameter") from error
    schema["function"].pop("return", None)
    return schema


class Template:
    """Forks workers and reports on them."""

    def __init__(self, sock: socket.socket, functions: list[Any], settings: dict[str, Any]):
        self._socket, self._functions, self._settings = sock, functions, settings
        self._workers: dict[int, int] = {}  # pid -> number
        self._wake, self._waker = socket.socketpair()
        self._waker.setblocking(False)
        self._spared = set(_children())  # what the user's file started at import

    def serve(self) -> None:
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        frames = wire.FrameReader()
        selector = selectors.DefaultSelector()
        selector.register(self._socket, selectors.EVENT_READ)
        selector.register(self._wake, selectors.EVENT_READ)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the broker went: so does all of this
            self._obey(frames, selector)
        self._end()

    def _obey(self, frames: wire.FrameReader, selector: selectors.BaseSelector) -> None:
        while True:
            for key, _ in selector.select():
                if key.fileobj is self._wake:
                    self._wake.recv(4096)
                    self._reap()
                    continue
                data, descriptors, _, _ = socket.recv_fds(self._socket, 4096, 64)
                if not data:
                    return
                for (header, _), descriptor in zip(frames.feed(data), descriptors, strict=True):
                    self._fork(header, socket.socket(fileno=descriptor), selector)

    def _fork(self, header: dict[str, Any], sock: socket.socket, selector: selectors.BaseSelector) -> None:
        try:
            pid = os.fork()
        except OSError:
            pid = -1
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for ours in (self._socket, self._wake, self._waker, selector):
                ours.close()
            worker = Worker(self._functions, header["index"], header["stateful"], self._settings["max_output_chars"])
            work(sock, worker, self._settings["memory_mb"])
        sock.close()
        if pid > 0:
            self._workers[pid] = header["number"]
        self._socket.sendall(wire.pack({"op": "forked", "number": header["number"], "pid": pid}))

    def _reap(self) -> None:
        """Reports dead workers, after ending what is left of each one's group; other dead children are orphans."""
        died = False
        with contextlib.suppress(ChildProcessError):
            while gone := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                number = self._workers.pop(gone.si_pid, None)
                if number is not None:
                    _kill_group(gone.si_pid)
                _, status = os.waitpid(gone.si_pid, 0)
                if number is not None:
                    died = True
                    code = os.waitstatus_to_exitcode(status)
                    self._socket.sendall(wire.pack({"op": "dead", "number": number, "code": code}))
        if died:
            self._end_orphans()

    def _end_orphans(self) -> None:
        for pid in _children():
            if pid not in self._workers and pid not in self._spared:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _end(self) -> None:
        for pid in self._workers:
            _kill_group(pid)
        for pid in list(self._workers):
            os.waitpid(pid, 0)
        self._workers.clear()
        self._spared.clear()
        self._end_orphans()


def _children() -> list[int]:
    """Direct children of this process; none where the kernel does not list them."""
    with contextlib.suppress(OSError), open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
        return [int(word) for word in file.read().split()]
    return []


def _kill_group(pid: int) -> None:
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def _described(sock: socket.socket, path: str, functions: list[Any]) -> None:
    """Says hello from a fork, so that the libraries behind the schemas stay out of the workers."""
    pid = os.fork()
    if pid:
        os.waitpid(pid, 0)
        return
    try:
        shown = os.path.basename(path)
        hello = []
        for function in functions:
            examples: dict[str, Any] = {}
            schemas = describe(shown, function, examples)
            hello.append({"schemas": schemas, "stateful": inspect.isclass(function), "examples": examples})
        sock.sendall(wire.pack({"op": "hello"}, json.dumps(hello).encode()))
    except SpecError as error:
        sock.sendall(wire.pack({"op": "failed", "error": str(error)}))
    finally:
        os._exit(0)


def _reward(score: Any) -> tuple[list[Any], bytes]:
    """What workers of a reward serve, and the hello that says whether its file has a `gold`. Raises SpecError."""
    if not inspect.isfunction(score) or inspect.iscoroutinefunction(score):
        raise SpecError(f"{score.__name__}: is no plain function; write def {score.__name__}(trajectory, problem)")
    try:
        inspect.signature(score).bind("trajectory", "problem")
    except TypeError as error:
        raise SpecError(f"{score.__name__}: {error}; write def {score.__name__}(trajectory, problem)") from error
    gold = score.__globals__.get("gold")
    gold = gold if inspect.isfunction(gold) else None
    return worker_functions(score, gold), json.dumps([{"gold": gold is not None}]).encode()


def main(fd: int, settings: dict[str, Any]) -> None:
    """Runs the template of settings["path"] on the socket `fd`."""
    sock = socket.socket(fileno=fd)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    try:
        functions = load(settings["path"], settings["names"])
        hello = b"[]"  # where the trainer has the schemas already
        if settings.get("reward"):
            functions, hello = _reward(functions[0])
    except SpecError as error:
        sock.sendall(wire.pack({"op": "failed", "error": str(error)}))
        return
    if settings.get("again") or settings.get("reward"):
        sock.sendall(wire.pack({"op": "hello"}, hello))
    else:
        _described(sock, settings["path"], functions)
    Template(sock, functions, settings).serve()
