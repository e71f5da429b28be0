"""The Python tool as the trainer uses it."""

import pytest

import config
import tools


@pytest.fixture(scope="module")
def tool():
    made = tools.PythonTool(config.ToolConfig(preload=(), max_running=2, timeout_seconds=2.0))
    yield made
    made.close()


def test_a_program_gives_back_what_it_prints(tool):
    result = tool.submit("print(47*83+29)").result()
    assert (result.status, result.text, result.error_type) == ("ok", "3930", "")
    assert tool("print('a'); print('b')") == "a\nb"


def test_an_endless_power_ends_and_the_tool_goes_on(tool):
    result = tool.submit("print(10005322830**10000000200520000002020)").result()
    assert result.status in ("timeout", "out_of_memory")
    assert tool("print(1)") == "1"


def test_the_schema_tells_the_model_how_values_are_seen():
    assert tools.tool_schema(config.ToolConfig()) == {
        "type": "function",
        "function": {
            "name": "python",
            "description": "Runs a Python program and returns what it prints. Use print() to see a value.",
            "parameters": {
                "type": "object",
                "properties": {"code": {"type": "string", "description": "The program to run."}},
                "required": ["code"],
            },
        },
    }
    shown = tools.tool_schema(config.ToolConfig(show_last_value=True))
    assert "last line" in shown["function"]["description"]


def test_close_is_idempotent_and_a_closed_tool_refuses_calls():
    made = tools.PythonTool(config.ToolConfig(preload=(), max_running=2))
    pending = made.submit("while True: pass")
    made.close()
    made.close()
    assert pending.result().status == "infra"
    with pytest.raises(RuntimeError, match="closed"):
        made.submit("print(1)")
