"""The tools of one MCP server over stdio, through the official `mcp` package (optional: requirements/mcp.txt).

The server is started by a thread of its own, which runs an asyncio loop; calls are handed over as coroutines, so the
caller never waits. Invariants: every future resolves, each call within its time limit; a call that runs too long is
that call's answer (timeout), a server that ended is infra. Left out: prompts, resources, sampling, a server's restart.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import importlib
import os
import shlex
import threading
import time
from typing import Any

from sandbox.parent import render
from sandbox.parent.link import StartError

START_S = 60.0

Answer = dict[str, Any]  # status, error_type, text, truncated, wall_s


class McpClient:
    """A running server. `schemas` are its tools in the form of chat templates. Thread-safe; close() it."""

    def __init__(self, command: str, *, timeout_s: float, max_chars: int):
        """Starts the server and lists its tools. Raises StartError: one line, with the fix."""
        self._name, self._timeout_s, self._max_chars = command, timeout_s, max_chars
        try:
            self._mcp = importlib.import_module("mcp")
        except ImportError as error:
            fix = "needs the mcp package; pip install -r requirements/mcp.txt"
            raise StartError(f"tool.mcp={command!r}: {fix}") from error
        if not shlex.split(command):
            raise StartError(f"tool.mcp={command!r}: is empty; write the server's command and arguments")
        self.schemas: list[dict[str, Any]] = []
        self._session: Any = None
        self._ended = False
        self._loop = asyncio.new_event_loop()
        self._started: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._thread = threading.Thread(target=self._main, name="mcp", daemon=True)
        self._thread.start()
        try:
            self._started.result(START_S)
        except BaseException as error:
            self.close()
            said = " ".join(str(error).split()) or type(error).__name__
            raise StartError(f"tool.mcp={command!r}: cannot be started: {said}; run the command by hand") from error

    def call(self, name: str, arguments: dict[str, Any]) -> concurrent.futures.Future[Answer]:
        """The future's result says how the call ended."""
        if self._ended:
            done: concurrent.futures.Future[Answer] = concurrent.futures.Future()
            done.set_result(self._answer("infra", "Infra", "", time.monotonic()))
            return done
        return asyncio.run_coroutine_threadsafe(self._call(name, arguments), self._loop)

    def close(self) -> None:
        """Ends the server; calls under way resolve as infra. Idempotent."""
        if not self._loop.is_closed():
            with contextlib.suppress(RuntimeError):  # the loop ends this moment
                self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10.0)

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._stop = asyncio.Event()
        try:
            self._loop.run_until_complete(self._serve())
        except BaseException as error:
            if not self._started.done():
                self._started.set_exception(_innermost(error))
        finally:
            self._ended = True
            rest = asyncio.all_tasks(self._loop)
            self._loop.run_until_complete(asyncio.gather(*rest, return_exceptions=True))
            self._loop.close()

    async def _serve(self) -> None:
        command, *arguments = shlex.split(self._name)
        parameters = self._mcp.StdioServerParameters(command=command, args=arguments, env=dict(os.environ))
        with open(os.devnull, "w") as null:
            async with self._mcp.stdio_client(parameters, errlog=null) as (reader, writer):
                async with self._mcp.ClientSession(reader, writer) as session:
                    await session.initialize()
                    for tool in (await session.list_tools()).tools:
                        self.schemas.append(_schema(tool))
                    self._session = session
                    self._started.set_result(None)
                    await self._stop.wait()
                    self._ended = True

    async def _call(self, name: str, arguments: dict[str, Any]) -> Answer:
        began = time.monotonic()
        asking = asyncio.ensure_future(self._session.call_tool(name, arguments))
        stopping = asyncio.ensure_future(self._stop.wait())
        await asyncio.wait((asking, stopping), timeout=self._timeout_s, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not asking.done():
            asking.cancel()
            if self._stop.is_set():
                return self._answer("infra", "Infra", "", began)
            words = f"TimeoutError: the tool ran longer than {self._timeout_s:g} s and was stopped"
            return self._answer("timeout", "Timeout", words, began)
        try:
            result = asking.result()
        except BaseException as error:
            if type(error).__name__ in ("MCPError", "McpError") and "closed" not in str(error).lower():
                return self._answer("error", "McpError", f"McpError: {error}", began)
            self._ended = True
            return self._answer("infra", "Infra", "", began)
        failed = getattr(result, "is_error", getattr(result, "isError", False))
        text = "\n".join(getattr(one, "text", f"[{one.type}]") for one in result.content)
        return self._answer("error" if failed else "ok", "McpError" if failed else "", text, began)

    def _answer(self, status: str, kind: str, text: str, began: float) -> Answer:
        shown, cut = render.shorten([render.clean(text.encode("utf-8", "surrogatepass"))], self._max_chars)
        shown = shown or ("" if status == "infra" else "(no output)")
        return {"status": status, "error_type": kind, "text": shown, "truncated": cut,
                "wall_s": time.monotonic() - began}  # fmt: skip


def _schema(tool: Any) -> dict[str, Any]:
    parameters = getattr(tool, "input_schema", None) or tool.inputSchema
    function = {"name": tool.name, "description": tool.description or "", "parameters": parameters}
    return {"type": "function", "function": function}


def _innermost(error: BaseException) -> BaseException:
    """The cause inside the groups that task groups raise."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
