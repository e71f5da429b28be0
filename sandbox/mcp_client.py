"""The tools of one MCP server over stdio, through the official `mcp` package (optional: requirements/mcp.txt).

The server is started by a thread of its own, which runs an asyncio loop; calls are handed over as coroutines, so the
caller never waits. Invariants: every future resolves, each call within its time limit; a call that runs too long is
that call's answer (timeout), and so is a server that ends under a call (error): the next call starts a new one. Infra
is a server that cannot be started again. One server serves all trajectories of a rank, so its end is an answer to each
call that was under way. Left out: prompts, resources, sampling, one server a trajectory.
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
ENDED = "The tool's server ended; the next call starts a new one."

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
        self._session: Any = None  # None while no server runs
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
        self._ready: asyncio.Future[None] = self._loop.create_future()  # the next server
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
        """One server after another, each but the first at a call's wish, until `close`."""
        while not self._stop.is_set():
            self._dead, self._wanted = asyncio.Event(), asyncio.Event()
            try:
                await self._serve_once()
            except BaseException as error:
                if not self._started.done():
                    raise
                if not self._ready.done():
                    self._ready.set_exception(_innermost(error))
                    self._ready.exception()  # read, or the loop complains
            self._session = None
            self._ready = self._loop.create_future()
            await _first(self._wanted.wait(), self._stop.wait())

    async def _serve_once(self) -> None:
        command, *arguments = shlex.split(self._name)
        parameters = self._mcp.StdioServerParameters(command=command, args=arguments, env=dict(os.environ))
        with open(os.devnull, "w") as null:
            async with self._mcp.stdio_client(parameters, errlog=null) as (reader, writer):
                async with self._mcp.ClientSession(reader, writer) as session:
                    await session.initialize()
                    listed = (await session.list_tools()).tools
                    self._session = session
                    if not self._started.done():
                        self.schemas += map(_schema, listed)
                        self._started.set_result(None)
                    if not self._ready.done():
                        self._ready.set_result(None)
                    await _first(self._dead.wait(), self._stop.wait())

    async def _call(self, name: str, arguments: dict[str, Any]) -> Answer:
        began = time.monotonic()
        if self._session is None or self._dead.is_set():
            try:
                await asyncio.wait_for(self._restarted(), START_S)
            except BaseException:
                return self._answer("infra", "Infra", "", began)
            began = time.monotonic()
        dead = self._dead
        asking = asyncio.ensure_future(self._session.call_tool(name, arguments))
        await _first(asking, self._stop.wait(), dead.wait(), timeout=self._timeout_s)
        if self._stop.is_set():
            asking.cancel()
            return self._answer("infra", "Infra", "", began)
        if not asking.done():
            asking.cancel()
            words = f"TimeoutError: the tool ran longer than {self._timeout_s:g} s and was stopped"
            return (
                self._answer("error", "Ended", ENDED, began)
                if dead.is_set()
                else self._answer("timeout", "Timeout", words, began)
            )
        try:
            result = asking.result()
        except BaseException as error:
            if type(error).__name__ in ("MCPError", "McpError") and "closed" not in str(error).lower():
                return self._answer("error", "McpError", f"McpError: {error}", began)
            dead.set()
            return self._answer("error", "Ended", ENDED, began)
        failed = getattr(result, "is_error", getattr(result, "isError", False))
        text = "\n".join(getattr(one, "text", f"[{one.type}]") for one in result.content)
        return self._answer("error" if failed else "ok", "McpError" if failed else "", text, began)

    async def _restarted(self) -> None:
        """Until a new server is there. Raises what kept it from starting."""
        while self._session is None or self._dead.is_set():
            self._wanted.set()
            ready = self._ready
            if self._session is None:
                await asyncio.shield(ready)
            else:
                await asyncio.sleep(0.01)  # the dead one is being put away

    def _answer(self, status: str, kind: str, text: str, began: float) -> Answer:
        shown, cut = render.shorten([render.clean(text.encode("utf-8", "surrogatepass"))], self._max_chars)
        shown = shown or ("" if status == "infra" else "(no output)")
        return {"status": status, "error_type": kind, "text": shown, "truncated": cut,
                "wall_s": time.monotonic() - began}  # fmt: skip


async def _first(*waited: Any, timeout: float | None = None) -> None:
    """Until one of them is done; what this call made of coroutines is cancelled then."""
    tasks = [asyncio.ensure_future(one) for one in waited]
    await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    for task, one in zip(tasks, waited, strict=True):
        if task is not one:
            task.cancel()


def _schema(tool: Any) -> dict[str, Any]:
    parameters = getattr(tool, "input_schema", None) or tool.inputSchema
    function = {"name": tool.name, "description": tool.description or "", "parameters": parameters}
    return {"type": "function", "function": function}


def _innermost(error: BaseException) -> BaseException:
    """The cause inside the groups that task groups raise."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
