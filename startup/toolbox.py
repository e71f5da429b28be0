"""Starts what the policy may call: the user's own tools first, since their schemas are part of the prompt, then all.

Both are refused or started before anything is written and before CUDA is touched: they start processes, which must
inherit nothing of the GPU. What `check` finds out about them is here too.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from config import Config
from configs.schema import located_spec
from startup import inputs

if TYPE_CHECKING:
    from rollout.engine import Session
    from startup.building import Parts
    from tools import ToolBox, ToolSet, UserFile

TOOL_PROGRAM, TOOL_OUTPUT = "print(6 * 7)", "42"
SHOWN_TEXT = 80  # characters of an example call's answer
Found = tuple[str, Literal["ok", "note", "FAIL"], str]  # a `startup.check.Finding`


@dataclass(slots=True)
class OwnTools:
    """The running tools of tool.functions and tool.mcp."""

    sets: list[ToolSet] = field(default_factory=list)
    files: list[UserFile] = field(default_factory=list)  # of tool.functions, as imported
    examples: dict[str, dict[str, Any]] = field(default_factory=dict)  # tool -> arguments of its docstring's example

    @property
    def schema(self) -> list[dict[str, Any]]:
        return [schema for one in self.sets for schema in one.schema]


@contextlib.contextmanager
def started_own(config: Config, wanted: bool = True, beside: Path | None = None) -> Iterator[OwnTools]:
    """The user's own tools; none where the config has none or `wanted` is off.

    beside: folder of the run whose settings these are, which keeps copies of the files
    Raises UserError for a file, a name or a command that cannot be used, and for two tools of one name.
    """
    own = OwnTools()
    if not (config.tool.has_own and wanted):
        yield own
        return
    from tools import McpTools, ToolBox, UserTools

    with contextlib.ExitStack() as held:
        if config.tool.functions:
            place = beside or Path.cwd()
            functions = UserTools([located_spec(spec, place) for spec in config.tool.functions], config.tool, place)
            held.callback(functions.close)
            own.sets.append(functions)
            own.files, own.examples = functions.files, functions.examples
        for command in config.tool.mcp:
            server = McpTools(command, config.tool)
            held.callback(server.close)
            own.sets.append(server)
        ToolBox(own.sets)  # refuses equal names
        yield own


@contextlib.contextmanager
def started_tools(config: Config, own: OwnTools, wanted: bool = True) -> Iterator[ToolBox | None]:
    """All tools as one; None where none is offered or `wanted` is off. Closes the Python tool alone."""
    if not (config.tool.offered and wanted):
        yield None
        return
    from tools import PythonTool, ToolBox

    if not config.tool.enabled:
        yield ToolBox(own.sets)
        return
    python = PythonTool(config.tool)
    try:
        inputs.tell(python.report)
        yield ToolBox([python, *own.sets])
    finally:
        python.close()


def check_tools(parts: Parts) -> list[Found]:
    """The Python tool computes, and each of the user's tools as the model sees it, called once with its example."""
    if parts.tool is None:
        return [("tool", "ok", "off")]
    session = parts.tool.open(dict(parts.data.problems[0].row))
    try:
        python = [_check_python(session)] if parts.config.tool.enabled else []
        names = [schema["function"]["name"] for schema in parts.own.schema]
        return python + [_check_own_tool(parts, session, name) for name in names]
    finally:
        session.close()


def _check_own_tool(parts: Parts, session: Session, name: str) -> Found:
    shown = parts.chat.tool_text(name)
    text = f"{shown}\n      {name} costs {_cost(parts, shown)} prompt tokens"
    arguments = parts.own.examples.get(name)
    if arguments is None:
        return ("tool", "ok", f'{text}; not called, since its docstring has no line Example: {{"argument": ...}}')
    started = time.perf_counter()
    result = session.call(name, arguments, 0).result()
    text += f"; {name}({json.dumps(arguments, ensure_ascii=False)}) gave {result.status} {result.text[:SHOWN_TEXT]!r}"
    text += f" in {1000 * (time.perf_counter() - started):.1f} ms"
    if result.status != "ok":
        return ("tool", "FAIL", f"{text}: fix the tool or its example")
    return ("tool", "ok", text)


def _cost(parts: Parts, shown: str) -> int:
    """Tokens that a tool's text takes in the first prompt."""
    ids = parts.data.prompts[0]
    text = str(parts.tokenizer.decode(ids, skip_special_tokens=False))
    if shown not in text:  # a template of its own habits
        return len(parts.tokenizer.encode(shown, add_special_tokens=False))
    return len(ids) - len(parts.tokenizer.encode(text.replace(shown, ""), add_special_tokens=False))


def _check_python(session: Session) -> Found:
    started = time.perf_counter()
    result = session.call("python", {"code": TOOL_PROGRAM}, 0).result()
    said = f"{TOOL_PROGRAM} gave {result.status} {result.text.strip()!r}"
    if result.status != "ok" or result.text.strip() != TOOL_OUTPUT:
        return ("tool", "FAIL", f"{said}: see the sandbox's report above, or set tool.enabled=false")
    return ("tool", "ok", f"{said} in {1000 * (time.perf_counter() - started):.1f} ms")
