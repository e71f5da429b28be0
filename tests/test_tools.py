"""The Python tool as the trainer uses it."""

import dataclasses
import os
import signal

import pytest

import config
import tools

SETTINGS = config.ToolConfig(preload=(), max_running=2, timeout_seconds=2.0)


@pytest.fixture(scope="module")
def tool():
    made = tools.PythonTool(SETTINGS)
    yield made
    made.close()


@pytest.fixture(scope="module")
def notebook():
    made = tools.PythonTool(dataclasses.replace(SETTINGS, show_last_value=True, max_output_chars=200))
    yield made
    made.close()


def test_a_program_gives_back_what_it_prints(tool):
    result = tool.submit("print(47*83+29)").result()
    assert (result.status, result.text, result.error_type) == ("ok", "3930", "")
    assert (result.stdout, result.stderr, result.value_shown, result.truncated) == ("3930\n", "", False, False)
    assert 0 < result.wall_s < 2 and 0 <= result.cpu_s < 2 and result.queue_s >= 0
    assert tool("print('a'); print('b')") == "a\nb"


def test_an_endless_power_ends_and_the_tool_goes_on(tool):
    result = tool.submit("print(10005322830**10000000200520000002020)", timeout=0.5).result()
    assert result.status in ("timeout", "out_of_memory")
    assert tool("print(1)") == "1"


@pytest.mark.parametrize(
    ("code", "status", "error_type", "text"),
    [
        ("print('partial')\n1/0", "error", "ZeroDivisionError", "partial\nTraceback (most recent call last):\n"),
        (
            "print('row')\nwhile True: pass",
            "timeout",
            "Timeout",
            "row\nTimeoutError: the program ran longer than 0.4 s",
        ),
        ("x = [0] * 10**12", "out_of_memory", "MemoryError", "Traceback"),
        ("while True: print('x' * 1000)", "output_limit", "OutputLimit", "xxx"),
        ("import sys\nsys.exit(3)", "exit", "SystemExit", "Exited with status 3"),
        ("import sys\nsys.exit('words')", "exit", "SystemExit", "words\nExited with status 1"),
        ("import sys\nprint('a')\nsys.exit()", "ok", "", "a"),
        ("print('a')\nquit()\nprint('b')", "ok", "", "a"),
        ("print('a')\nawait f()", "error", "SyntaxError", '  File "<python>", line 2'),
        ("import signal", "refused", "Refused", "Refused: import of 'signal'"),
        ("import os", "refused", "Refused", "Refused: import of 'os' is not allowed (allowed: "),
        ("x = = 2", "error", "SyntaxError", '  File "<python>", line 1\n    x = = 2\n        ^\nSyntaxError: '),
        ("print('a')\0", "error", "SyntaxError", "SyntaxError: source code string cannot contain null bytes"),
        ("print('\ud800')", "error", "UnicodeEncodeError", "UnicodeEncodeError: 'utf-8' codec"),
        ("", "ok", "", "(no output)"),
    ],
)
def test_each_end_has_its_status_and_its_words(tool, code, status, error_type, text):
    result = tool.submit(code, timeout=0.4 if status == "timeout" else None).result()
    assert (result.status, result.error_type) == (status, error_type)
    assert result.text.startswith(text)


def test_a_traceback_shows_the_program_s_lines_and_none_of_ours(tool):
    text = tool(
        "def f(x):\n    return 1 / x\ntry: f(0)\nexcept ZeroDivisionError as e:\n    raise ValueError('no') from e"
    )
    assert "    return 1 / x" in text and 'File "<python>", line 2, in f' in text and text.endswith("ValueError: no")
    assert "sandbox" not in text and "exec(" not in text


def test_the_same_seed_gives_the_same_output(tool):
    code = (
        "import random, numpy as np\n"
        "print(random.random(), random.sample(range(99), 5), np.random.rand(), np.random.default_rng().random())\n"
        "print({'a', 'b', 'c', 'd'}, hash('x'))"
    )
    first, again, other = (tool.submit(code, seed=seed).result().text for seed in (7, 7, 2**70 + 8))
    assert first == again != other


def test_numpy_and_sympy_come_preloaded_and_seeded():
    with_libraries = tools.PythonTool(config.ToolConfig(max_running=2))
    code = "import numpy as np, sympy\nprint(np.random.rand(), np.random.default_rng().random(), sympy.sqrt(8))"
    first, again, other = (with_libraries.submit(code, seed=seed).result().text for seed in (1, 1, 2))
    with_libraries.close()
    assert first == again != other and first.endswith("2*sqrt(2)")


def test_programs_find_packages_on_the_path_and_not_the_project(tmp_path, monkeypatch):
    for name, inside in (("libraries", "thing-1.0.dist-info"), ("project", "data")):
        (tmp_path / name / inside).mkdir(parents=True)
        (tmp_path / name / f"{name}_module.py").write_text(f"print('found {name}')")
        monkeypatch.syspath_prepend(str(tmp_path / name))
    made = tools.PythonTool(dataclasses.replace(SETTINGS, preload=("libraries_module",)))
    seen = made("import sys\nprint(sys.path)")
    made.close()
    assert str(tmp_path / "libraries") in seen and "project" not in seen
    with pytest.raises(tools.SandboxError, match="project_module"):
        tools.PythonTool(dataclasses.replace(SETTINGS, preload=("project_module",)))


def test_a_library_that_is_not_there_is_named_with_the_mend():
    with pytest.raises(tools.SandboxError, match=r"tool.preload='no_such_library'.*take it from the list"):
        tools.PythonTool(dataclasses.replace(SETTINGS, preload=("no_such_library",)))


def test_a_last_expression_is_shown_when_that_is_on(notebook):
    result = notebook.submit("x = 6\nx * 7").result()
    assert (result.text, result.value_shown) == ("42", True)
    assert notebook("x = 6") == "(no output)" and notebook("None") == "(no output)"
    assert notebook("x = 41\nx + 1;") == "42"  # a semicolon hides nothing
    assert "a" not in notebook.submit("print('a')\nawait f()").result().stdout  # nothing runs when a part is wrong


def test_without_it_a_last_expression_shows_nothing(tool):
    assert tool("x = 6\nx * 7") == "(no output)"


def test_long_output_keeps_head_and_tail_and_says_how_much_was_cut(notebook):
    result = notebook.submit("print('a' * 1000 + 'b' * 1000)").result()
    assert result.text == "a" * 100 + "\n... [1801 characters cut] ...\n" + "b" * 99
    assert result.truncated and len(result.stdout) == 2001
    assert notebook.submit("print('x' * 150)").result().truncated is False


def test_a_program_that_is_too_long_is_refused_without_being_run(tool):
    result = tool.submit("#" * (1 << 16) + "\nprint(1)").result(timeout=0)
    assert result.status == "refused" and "65536 bytes" in result.text


def test_the_schema_tells_the_model_how_values_are_seen():
    assert tools.tool_schema(SETTINGS) == {
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
    made = tools.PythonTool(SETTINGS)
    pending = made.submit("while True: pass")
    made.close()
    made.close()
    assert pending.result().status == "infra"
    assert made.stats()["calls"] == {"infra": 1}
    with pytest.raises(RuntimeError, match="closed"):
        made.submit("print(1)")


def test_a_demanded_boundary_that_the_host_lacks_refuses_to_start():
    strict = dataclasses.replace(SETTINGS, require="boundary")
    with pytest.raises(tools.SandboxError, match=r"tool.require='boundary'.*no seccomp"):
        tools.PythonTool(strict, without=("seccomp",))


def test_an_open_import_filter_needs_a_boundary(monkeypatch):
    monkeypatch.setattr(tools.report, "verdict", lambda hello: (False, "sandbox: BEST EFFORT"))
    with pytest.raises(tools.SandboxError, match=r"tool.import_filter='off'.*set 'on'.*BEST EFFORT"):
        tools.PythonTool(dataclasses.replace(SETTINGS, import_filter="off"))


def test_submit_never_waits_even_for_a_broker_that_stands_still(tool):
    """The decoder's loop is the one that submits; how late it gets is measured in benchmarks/bench_tools.py."""
    broker = tool.stats()["broker_pid"]
    os.kill(broker, signal.SIGSTOP)
    try:
        futures = [tool.submit(f"print({number})") for number in range(400)]
        assert not any(future.done() for future in futures)
    finally:
        os.kill(broker, signal.SIGCONT)
    assert [future.result(timeout=60).text for future in futures] == [str(number) for number in range(400)]
