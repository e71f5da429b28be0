"""Tools of an MCP server over stdio; the server is mcp-server-time where that is installed."""

import importlib.util
import os
import shutil
import sys
from pathlib import Path

import pytest

import config
import tools

HERE = shutil.which("mcp-server-time", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
needs_mcp = pytest.mark.skipif(importlib.util.find_spec("mcp") is None, reason="pip install -r requirements/mcp.txt")
SETTINGS = config.ToolConfig(timeout_seconds=5.0)
OWN = """
import os, time
from mcp.server import {cls} as Server
server = Server("own")
@server.tool()
def double(number: int) -> int:
    "Doubles."
    return 2 * number
@server.tool()
def fail() -> str:
    "Fails."
    raise ValueError("on purpose")
@server.tool()
async def wait() -> str:
    "Waits."
    import asyncio
    await asyncio.sleep(60)
    return ""
@server.tool()
def leave() -> str:
    "Ends the server."
    os._exit(3)
server.run()
"""


@pytest.fixture
def own(tmp_path):
    import mcp.server

    cls = "MCPServer" if hasattr(mcp.server, "MCPServer") else "FastMCP"
    (tmp_path / "server.py").write_text(OWN.format(cls=cls))
    made = tools.McpTools(f"{sys.executable} {tmp_path}/server.py", config.ToolConfig(timeout_seconds=2.0))
    yield made
    made.close()


@needs_mcp
def test_a_server_s_tools_are_called_and_end_in_their_limit(own):
    assert [one["function"]["name"] for one in own.schema] == ["double", "fail", "wait", "leave"]
    session = own.open({})
    assert session.call("double", {"number": 4}, 0).result(9).text == "8"
    assert session.call("fail", {}, 0).result(9).status == "error"
    assert session.call("double", {"number": "x"}, 0).result(9).status == "error"
    assert session.call("wait", {}, 0).result(9).status == "timeout"
    assert session.call("double", {"number": 5}, 0).result(9).text == "10"


@needs_mcp
def test_a_server_that_ends_is_its_call_s_answer_and_the_next_call_starts_a_new_one(own):
    session = own.open({})
    for number in range(2):
        assert session.call("leave", {}, 0).result(9).status in ("error", "timeout")
        assert session.call("double", {"number": number}, 0).result(20).text == str(2 * number)


@needs_mcp
@pytest.mark.skipif(HERE is None, reason="pip install mcp-server-time")
def test_a_server_from_the_package_index_serves_a_call():
    made = tools.McpTools(str(HERE), SETTINGS)
    assert {one["function"]["name"] for one in made.schema} >= {"get_current_time", "convert_time"}
    arguments = {"source_timezone": "UTC", "time": "12:00", "target_timezone": "Asia/Tokyo"}
    result = made.open({}).call("convert_time", arguments, 0).result(20)
    made.close()
    assert result.status == "ok" and "21:00" in result.text


@needs_mcp
def test_a_server_that_cannot_start_is_one_line():
    with pytest.raises(config.UserError, match=r"tool\.mcp='no-such-server': cannot be started"):
        tools.McpTools("no-such-server", SETTINGS)


def test_a_missing_package_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(config.UserError, match="needs the mcp package; pip install"):
        tools.McpTools("server", SETTINGS)
