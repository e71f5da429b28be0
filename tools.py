"""Tools as the trainer sees them: the Python tool, the user's own, and a box of both.

A tool set has `schema` (what the model is shown), `open(problem)` for one trajectory's session, and `close()`; a
session has `call(name, arguments, seed)`, a future of a `ToolResult`. Invariants: every future resolves, whatever
dies; `call` never waits for a program; a failure of the machinery itself has status "infra" and is never text for the
model nor a reward. Start them before CUDA is touched. The processes behind them live in sandbox/: programs of the
model in the sandbox, the user's own tools in plain worker processes.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import config
from sandbox.layers import limits
from sandbox.mcp_client import McpClient
from sandbox.parent import render, report
from sandbox.parent.libraries import library_paths
from sandbox.parent.link import Link, StartError
from sandbox.result import ToolResult, ToolSession, ToolSet, at_once
from sandbox.workers.client import Client, UserFile

__all__ = [
    "McpTools", "PythonTool", "SandboxError", "ToolBox", "ToolResult", "ToolSession", "ToolSet", "UserFile",
    "UserTools",
]  # fmt: skip

RECYCLE_CALLS = 5000  # programs that one fork server serves before a fresh one takes over
_INFRA = {"op": "answer", "status": "infra", "error_type": "Infra", "code": 0, "shown": False, "timeout_s": 0.0,
          "wall_s": 0.0, "cpu_s": 0.0, "queue_s": 0.0, "cut": [0, 0], "sizes": [0, 0, 0, 0]}  # fmt: skip


class SandboxError(config.UserError, RuntimeError):
    """The sandbox cannot start, cannot give what the settings demand, or failed. One line: what, and the mend."""


def tool_schema(settings: config.ToolConfig) -> dict[str, Any]:
    """The tool's description for the chat template."""
    how = "Runs a Python program and returns what it prints. Use print() to see a value."
    if settings.show_last_value:
        how = "Runs a Python program and returns what it prints and the value of a last line that is an expression."
    code = {"type": "string", "description": "The program to run."}
    parameters = {"type": "object", "properties": {"code": code}, "required": ["code"]}
    return {"type": "function", "function": {"name": "python", "description": how, "parameters": parameters}}


class PythonTool:
    """Runs programs in single-use, kernel-isolated processes. Thread-safe; close() it, or leave that to exit."""

    def __init__(self, settings: config.ToolConfig, *, without: Sequence[str] = ()):
        """Starts the processes and waits until they serve. `without` leaves layers off, to test what they do.

        Raises SandboxError, naming the setting and the mend.
        """
        unknown = set(without) - set(report.LAYERS)
        if unknown:
            raise ValueError(f"without={sorted(unknown)}: not among {report.LAYERS}")
        self._settings = settings
        self._owner = os.getpid()
        self._counts: Counter[str] = Counter()
        environment = dict(os.environ) if "environment" in without else {}
        try:
            self._link = Link(_broker_settings(settings, without), environment | limits.ENVIRONMENT, _INFRA)
        except StartError as error:
            raise SandboxError(str(error)) from error
        boundary, self.report = report.verdict(self._link.hello)
        demand = "" if boundary else _demand(settings, bool(without))
        if demand:
            self.close()
            raise SandboxError(f"{demand}: {self.report}")
        atexit.register(self.close)

    @property
    def schema(self) -> list[dict[str, Any]]:
        return [tool_schema(self._settings)]

    def open(self, problem: dict[str, Any]) -> ToolSession:
        """A trajectory's session; programs share nothing, so it has no state."""
        return _PythonSession(self)

    def submit(self, code: str, seed: int = 0, timeout: float | None = None) -> Future[ToolResult]:
        """Queues one program; `timeout` (seconds) replaces tool.timeout_seconds. RuntimeError after close()."""
        raw = code.encode("utf-8", "surrogatepass")
        if len(raw) > limits.CODE_BYTES:
            return self._too_long()
        header = {"op": "call", "seed": seed % 2**64, "timeout_s": timeout or self._settings.timeout_seconds}
        return self._link.ask(header, raw, self._result)

    def __call__(self, code: str) -> str:
        """Runs one program and returns the text for the model. Raises SandboxError when the sandbox itself failed."""
        result = self.submit(code).result()
        if result.status == "infra":
            raise SandboxError(f"the Python tool failed twice on one call; {self.report}")
        return result.text

    def stats(self) -> dict[str, Any]:
        """Calls by status and restarts; while it is open also the queue, running calls, spares and process ids."""
        mine = {"calls": dict(self._counts), "broker_restarts": self._link.restarts}
        with contextlib.suppress(RuntimeError):  # closed
            answer = self._link.ask({"op": "stats"}, b"", lambda header, _: header).result()
            mine |= {"broker_pid": self._link.pid} | answer.get("stats", {})
        return mine

    def close(self) -> None:
        """Ends every process of the tool; calls under way resolve as infra. Idempotent; a fork's copy does nothing."""
        if os.getpid() == self._owner:
            atexit.unregister(self.close)
            self._link.close()

    def _too_long(self) -> Future[ToolResult]:
        self._counts["refused"] += 1
        return at_once("refused", f"Refused: the program is longer than {limits.CODE_BYTES} bytes", "Refused")

    def _result(self, header: dict[str, Any], payload: bytes) -> ToolResult:
        self._counts[header["status"]] += 1
        pieces, start = [], 0
        for size in header["sizes"]:
            pieces.append(payload[start : start + size])
            start += size
        shown = render.render(header, pieces, self._settings.max_output_chars)
        return ToolResult(
            header["status"], shown.text, shown.stdout, shown.stderr, header["shown"], header["error_type"],
            header["wall_s"], header["cpu_s"], header["queue_s"], shown.truncated,
        )  # fmt: skip


class _PythonSession:
    def __init__(self, tool: PythonTool):
        self._tool = tool

    def call(self, name: str, arguments: dict[str, Any], seed: int) -> Future[ToolResult]:
        return self._tool.submit(arguments["code"], seed=seed)

    def close(self) -> None:
        """Nothing is held."""


class UserTools:
    """Functions and classes of the user's files, in worker processes. Thread-safe; close() it."""

    def __init__(self, functions: Sequence[str], settings: config.ToolConfig, beside: Path):
        """Imports each file once, in a process of its own. functions: "FILE.py:NAME", each looked for in the folder
        `beside`, then in the working directory.

        Raises SandboxError, with the spec and the fix, for a file or a name that cannot be used.
        """
        self._owner = os.getpid()
        try:
            self._client = Client(
                functions, beside, timeout_s=settings.timeout_seconds, memory_mb=settings.memory_mb,
                max_chars=settings.max_output_chars, max_running=calls_at_once(settings),
            )  # fmt: skip
        except StartError as error:
            raise SandboxError(str(error)) from error
        self.schema = [schema for *_, schema in self._client.schemas]
        self.examples = self._client.examples
        self._where: dict[str, tuple[int, int, str, bool]] = {}
        for *where, _ in self._client.schemas:
            self._where[where[2]] = (where[0], where[1], where[2], where[3])
        atexit.register(self.close)

    @property
    def files(self) -> list[UserFile]:
        """Path, text and SHA-256 of each file, as imported."""
        return self._client.files

    @property
    def pid(self) -> int:
        """The broker's."""
        return self._client.pid

    def workers(self) -> int:
        """Worker processes that serve now."""
        return self._client.workers()

    def open(self, problem: dict[str, Any]) -> ToolSession:
        """A trajectory's session. `problem` is the data row; a class gets it in its constructor."""
        return _UserSession(self._client, self._where, problem)

    def close(self) -> None:
        """Ends every process; calls under way resolve as infra. Idempotent; a fork's copy does nothing."""
        if os.getpid() == self._owner:
            atexit.unregister(self.close)
            self._client.close()


class _UserSession:
    def __init__(self, client: Client, where: dict[str, tuple[int, int, str, bool]], problem: dict[str, Any]):
        self._client, self._where, self._problem = client, where, problem
        self._number = -1  # of a trajectory that has called a tool with state

    def call(self, name: str, arguments: dict[str, Any], seed: int) -> Future[ToolResult]:
        raw = json.dumps(arguments).encode()
        if len(raw) > limits.CODE_BYTES:
            return at_once("refused", f"Refused: the arguments are longer than {limits.CODE_BYTES} bytes", "Refused")
        where = self._where[name]
        if where[3] and self._number < 0:
            self._number = self._client.open(self._problem)
        return self._client.call(where, self._number, raw, seed, _user_result)

    def close(self) -> None:
        if self._number >= 0:
            self._client.shut(self._number)
            self._number = -1


def _user_result(header: dict[str, Any], payload: bytes) -> ToolResult:
    return ToolResult(
        header["status"], payload.decode(), "", "", False, header["error_type"], header["wall_s"], header["cpu_s"],
        header["queue_s"], header["truncated"],
    )  # fmt: skip


class McpTools:
    """The tools of one MCP server: one process for all trajectories. close() it."""

    def __init__(self, command: str, settings: config.ToolConfig):
        """Starts `command` and lists its tools. Raises SandboxError, with the command and the fix."""
        limit, chars = settings.timeout_seconds, settings.max_output_chars
        try:
            self._client = McpClient(command, timeout_s=limit, max_chars=chars)
        except StartError as error:
            raise SandboxError(str(error)) from error
        self.schema = self._client.schemas
        self.close = self._client.close

    def open(self, problem: dict[str, Any]) -> ToolSession:
        """A trajectory's session; the server keeps what state it has for all."""
        return _McpSession(self._client)


class _McpSession:
    def __init__(self, client: McpClient):
        self._client = client

    def call(self, name: str, arguments: dict[str, Any], seed: int) -> Future[ToolResult]:
        future: Future[ToolResult] = Future()
        future.set_running_or_notify_cancel()
        self._client.call(name, arguments).add_done_callback(lambda done: future.set_result(_mcp_result(done)))
        return future

    def close(self) -> None:
        """Nothing is held."""


def _mcp_result(done: Future[dict[str, Any]]) -> ToolResult:
    if done.cancelled() or done.exception() is not None:
        return ToolResult("infra", "", "", "", False, "Infra", 0.0, 0.0, 0.0, False)
    one = done.result()
    return ToolResult(one["status"], one["text"], "", "", False, one["error_type"], one["wall_s"], 0.0, 0.0,
                      one["truncated"])  # fmt: skip


class ToolBox:
    """Several tool sets as one: names go to the set that has them."""

    def __init__(self, sets: Sequence[ToolSet]):
        """Raises SandboxError for two tools of one name."""
        self._sets = list(sets)
        self._owner: dict[str, int] = {}
        for index, one in enumerate(self._sets):
            for schema in one.schema:
                name = schema["function"]["name"]
                if name == "python" and not isinstance(one, PythonTool):
                    raise SandboxError("tool.functions: a tool is named 'python', the Python tool's name; rename it")
                if name in self._owner:
                    raise SandboxError(f"tool.functions, tool.mcp: two tools are named {name!r}; rename one")
                self._owner[name] = index

    @property
    def schema(self) -> list[dict[str, Any]]:
        return [schema for one in self._sets for schema in one.schema]

    def open(self, problem: dict[str, Any]) -> ToolSession:
        return _BoxSession([one.open(problem) for one in self._sets], self._owner)

    def close(self) -> None:
        for one in self._sets:
            one.close()


class _BoxSession:
    def __init__(self, sessions: list[ToolSession], owner: dict[str, int]):
        self._sessions, self._owner = sessions, owner

    def call(self, name: str, arguments: dict[str, Any], seed: int) -> Future[ToolResult]:
        """Raises KeyError for a name that the schema lacks; the chat format refuses those first."""
        return self._sessions[self._owner[name]].call(name, arguments, seed)

    def close(self) -> None:
        for one in self._sessions:
            one.close()


def calls_at_once(settings: config.ToolConfig) -> int:
    """Calls at once on this rank."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # of this host; each has tools of its own
    return settings.max_running or max(2, (cores - 2) // ranks)


def _demand(settings: config.ToolConfig, layers_left_off: bool) -> str:
    """The setting that asks for the boundary which this host lacks, with its mend; empty when none does."""
    if settings.require == "boundary":
        return "tool.require='boundary': this host gives none; set 'best_effort' or mend the host"
    if settings.import_filter == "off" and not layers_left_off:
        return "tool.import_filter='off': needs a boundary, and this host gives none; set 'on' or mend the host"
    return ""


def _broker_settings(settings: config.ToolConfig, without: Sequence[str]) -> dict[str, Any]:
    running = calls_at_once(settings)
    spares = min(max(32, 8 * running), 128)  # enough for a burst; one costs about a megabyte
    paths = library_paths()
    prefixes = [os.path.join(prefix, "lib") for prefix in (sys.base_prefix, sys.prefix)]
    zygote = {
        "paths": paths,
        "readable": [path for path in (*prefixes, *paths) if os.path.exists(path)],
        "preload": settings.preload,
        "memory_mb": settings.memory_mb,
        "tasks": spares + running + 64,
        "without": list(without),
        "cgroup_bytes": (1024 + running * (settings.memory_mb + 128)) << 20,
    }
    return {
        "max_running": running,
        "spares": spares,
        "low_water": running + 2,
        "recycle_calls": RECYCLE_CALLS,
        "show_last_value": settings.show_last_value,
        "import_filter": settings.import_filter == "on",
        "zygote": zygote,
    }
