"""Starts what the policy may call: the user's own tools first, since their schemas are part of the prompt, then all.

Both are refused or started before anything is written and before CUDA is touched: they start processes, which must
inherit nothing of the GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from config import Config
from configs.schema import located
from startup import inputs

if TYPE_CHECKING:
    from tools import ToolBox, ToolSet, UserFile


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
            functions = UserTools([located(spec, place) for spec in config.tool.functions], config.tool, place)
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
