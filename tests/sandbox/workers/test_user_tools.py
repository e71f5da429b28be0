"""The user's own tools in worker processes: what each call gives back, and what hostile ones leave behind."""

import os
import signal
import time
from pathlib import Path

import pytest

import config
import tools

BESIDE = Path(__file__).parents[2] / "support"
SETTINGS = config.ToolConfig(timeout_seconds=0.6, memory_mb=256, max_running=4, max_output_chars=200)
LOST = "\nThe state of Notebook is lost; the next call starts a new one."


@pytest.fixture(scope="module")
def user():
    specs = ["user_tools.py:search", "user_tools.py:dice", "user_tools.py:hostile", "user_tools.py:Notebook"]
    made = tools.UserTools(specs, SETTINGS, BESIDE)
    yield made
    made.close()


@pytest.fixture
def session(user):
    made = user.open({"prompt": "é"})
    yield made
    made.close()


def call(session, name, seed=0, **arguments):
    return session.call(name, arguments, seed).result(timeout=10)


def test_a_function_s_schema_comes_from_its_hints_and_docstring(user):
    assert [one["function"]["name"] for one in user.schema] == ["search", "dice", "hostile", "run", "wait"]
    assert user.schema[0]["function"]["parameters"] == {
        "type": "object",
        "properties": {
            "query": {"type": "string", "description": "What to look for."},
            "top": {"type": "integer", "description": "How many results."},
        },
        "required": ["query"],
    }


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("result = 'as it is'", "as it is"),
        ("result = {'é': [1, None]}", '{"é": [1, null]}'),
        ("result = float('nan')", "NaN"),
        ("result = b'bytes'", "b'bytes'"),
        ("result = {1, }", "{1}"),
        ("result = ''", "(no output)"),
        ("result = 'a\\x00b\\ud800'", "a\\x00b\\xed\\xa0\\x80"),
    ],
)
def test_a_return_value_becomes_text(session, code, text):
    result = call(session, "hostile", code=code)
    assert (result.status, result.text) == ("ok", text)


def test_long_text_is_cut_in_the_middle_as_the_python_tool_s_is(session):
    result = call(session, "hostile", code="result = 'a' * 10000")
    assert result.text == "a" * 100 + "\n... [9800 characters cut] ...\n" + "a" * 100 and result.truncated


def test_an_exception_is_the_answer_without_traceback_or_path(session):
    result = call(session, "hostile", code="raise KeyError('no such page')")
    assert (result.status, result.error_type, result.text) == ("error", "KeyError", "KeyError: 'no such page'")
    wrong = call(session, "search", quary="a")
    assert wrong.text == "TypeError: search() got an unexpected keyword argument 'quary'"


def test_random_and_numpy_follow_the_call_s_seed(session):
    code = "import numpy, random; result = [random.random(), float(numpy.random.rand())]"
    call(session, "hostile", code="import numpy")
    once, again, other = (call(session, "dice", seed=seed).text for seed in (1, 1, 2))
    assert once == again != other
    assert call(session, "hostile", code=code, seed=5).status == "ok"


def test_a_class_keeps_its_state_for_one_trajectory_and_knows_its_problem(user, session):
    other = user.open({"prompt": "other"})
    call(session, "run", code="x = 1")
    call(other, "run", code="x = 2")
    assert call(session, "run", code="result = [x, problem['prompt']]").text == '[1, "é"]'
    assert call(other, "run", code="result = [x, problem['prompt']]").text == '[2, "other"]'
    other.close()


def test_calls_of_one_set_run_in_order_and_those_of_others_beside_them(user):
    sessions = [user.open({}) for _ in range(4)]
    began = time.perf_counter()
    futures = [one.call("wait", {"seconds": 0.1}, 0) for one in sessions for _ in range(2)]
    assert all(f.result().text == "waited" for f in futures)
    assert 0.2 <= time.perf_counter() - began < 0.6
    for one in sessions:
        one.close()


@pytest.mark.parametrize(
    ("code", "status", "text"),
    [
        ("import os; os._exit(3)", "error", "Exited with status 3"),
        ("import os; os.kill(os.getpid(), 9)", "error", "Crashed: signal SIGKILL"),
        ("while True: pass", "timeout", "TimeoutError: the tool ran longer than 0.6 s and was stopped"),
        ("x = bytearray(1 << 40)", "out_of_memory", "MemoryError: the tool used too much memory"),
    ],
)
def test_a_call_that_ends_its_process_says_so_and_the_next_one_starts_afresh(session, code, status, text):
    call(session, "run", code="x = 1")
    result = call(session, "run", code=code)
    assert (result.status, result.text) == (status, text + LOST)
    assert call(session, "run", code="result = 'x' in globals()").text == "false"


def test_a_process_that_dies_between_two_calls_is_the_next_call_s_answer_and_drops_no_trajectory(session):
    code = "import os, threading; threading.Timer(.05, os._exit, (1,)).start()"
    assert call(session, "run", code=code).status == "ok"
    time.sleep(0.2)
    result = call(session, "run", code="result = 1")
    assert (result.status, result.text) == ("error", "Its process ended between two calls" + LOST)
    assert call(session, "run", code="result = 1").status == "ok"


def test_a_constructor_that_raises_is_the_answer_of_each_call(user):
    session = user.open({"init": "raise ValueError('bad row')"})
    assert [call(session, "run", code="").text for _ in range(2)] == ["ValueError: bad row"] * 2
    session.close()


def test_closing_ends_the_state_and_calls_close(user, tmp_path):
    mark = tmp_path / "closed"
    session = user.open({"close": f"open({str(mark)!r}, 'w')"})
    before = user.workers()
    call(session, "run", code="x = 1")
    session.close()
    _until(mark.exists)
    _until(lambda: user.workers() <= before)


def test_arguments_beyond_64_kib_are_refused(session):
    assert call(session, "hostile", code="", value="a" * 70000).status == "refused"


def test_a_dead_broker_is_replaced_and_its_states_are_infra(tmp_path):
    made = tools.UserTools(["user_tools.py:Notebook"], SETTINGS, BESIDE)
    session = made.open({})
    call(session, "run", code="x = 1")
    os.kill(made.pid, signal.SIGKILL)
    assert call(session, "run", code="result = x").status == "infra"
    made.close()


def test_the_file_s_text_and_hash_are_at_hand(user):
    (one,) = user.files
    assert one.text == (BESIDE / "user_tools.py").read_text() and len(one.sha256) == 64


GOOD = 'def f(a: int) -> int:\n    """Does.\n\n    Args:\n        a: A.\n    """\n    return a\n'


@pytest.mark.parametrize(
    ("text", "spec", "words"),
    [
        (GOOD, "t.py", "is no FILE.py:NAME"),
        (GOOD, "none.py:f", "none.py is neither in"),
        (GOOD, "t.py:g", "t.py:g: no such function or class; the file has f"),
        ("import nothing_here", "t.py:f", "t.py: cannot be imported: ModuleNotFoundError: No module named"),
        ("1/0", "t.py:f", "t.py: cannot be imported: ZeroDivisionError"),
        ("raise SystemExit(3)", "t.py:f", "t.py: cannot be imported: SystemExit: 3"),
        ("import os; os._exit(3)", "t.py:f", "its process ended; fix the file"),
        (GOOD.replace("a: int", "a"), "t.py:f", "t.py:f: parameter 'a' has no type"),
        (GOOD.replace("        a: A.\n", ""), "t.py:f", "t.py:f: "),
        ("def f(): pass", "t.py:f", "t.py:f: has no docstring"),
        ("async " + GOOD, "t.py:f", "t.py:f: is async"),
        ("class C: pass", "t.py:C", "t.py:C: no public method with a docstring"),
        ("x = (", "t.py:f", "t.py: cannot be imported: SyntaxError"),
    ],
)
def test_a_spec_that_cannot_work_is_one_line_at_start(tmp_path, text, spec, words):
    (tmp_path / "t.py").write_text(text)
    with pytest.raises(config.UserError) as error:
        tools.UserTools([spec], SETTINGS, tmp_path)
    assert words in str(error.value) and "\n" not in str(error.value) and "tool.functions" in str(error.value)


class _Set:
    def __init__(self, *names):
        self.schema = [{"type": "function", "function": {"name": name}} for name in names]

    def close(self):
        pass


def test_two_tools_of_one_name_and_a_user_tool_called_python_are_refused(user):
    with pytest.raises(config.UserError, match="two tools are named 'search'"):
        tools.ToolBox([user, _Set("search")])
    with pytest.raises(config.UserError, match="named 'python'"):
        tools.ToolBox([_Set("python")])


def test_a_box_sends_each_name_to_the_set_that_has_it(user):
    python = tools.PythonTool(config.ToolConfig(preload=(), max_running=2))
    box = tools.ToolBox([python, user])
    session = box.open({})
    assert call(session, "python", code="print(1)").text == "1"
    assert call(session, "search", query="a", top=1).text == '["a 0"]'
    session.close()
    python.close()


FAST = {
    "endless": ("while True: pass", "timeout"),
    "asleep": ("import time; time.sleep(99)", "timeout"),
    "raising": ("raise RuntimeError('no')", "error"),
    "exiting": ("import sys; sys.exit(3)", "error"),
    "ending at once": ("import os; os._exit(0)", "error"),
    "killing itself": ("import os; os.kill(os.getpid(), 15)", "error"),
    "killing its group": ("import os; os.killpg(0, 9)", "error"),
    "killing its parent": ("import os; os.kill(os.getppid(), 9)", "ok"),
    "huge output": ("result = 'x' * 50_000_000", "ok"),
    "printing": ("print('x' * 1000000)", "ok"),
    "closing stdin": ("import sys, os; sys.stdin.close(); os.close(0)", "ok"),
    "closing all": ("import os; os.closerange(0, 256)", "error"),
    "not picklable": ("result = lambda: 0", "ok"),
    "recursion": ("f = lambda: f()\nf()", "error"),
    "memory": ("x = []\nwhile True: x.append(bytearray(10**7))", "out_of_memory"),
    "threads left": ("import threading as t\nfor _ in range(9): t.Thread(target=t.Event().wait).start()", "ok"),
    "children left": ("import subprocess\nfor _ in range(5): subprocess.Popen(['sleep', '99'])", "ok"),
    "daemons left": ("import subprocess; subprocess.Popen(['setsid', 'sleep', '99'], start_new_session=True)", "ok"),
    "trace": ("import sys; sys.settrace(lambda *_: 1 / 0)", None),
    "null pointer": ("import ctypes; ctypes.string_at(0)", "error"),
    "alarm": ("import signal; signal.alarm(1)", "ok"),
    "ignoring signals": ("import signal; signal.signal(15, signal.SIG_IGN)\nwhile True: pass", "timeout"),
}  # fmt: skip
_EXCEPTIONS = [
    "KeyboardInterrupt",
    "GeneratorExit",
    "SystemExit",
    "StopIteration",
    "OSError",
    "UnicodeError",
    "Warning",
    "BaseException",
    "EOFError",
    "RecursionError",
    "ImportError",
    "ArithmeticError",
    "ConnectionResetError",
    "BrokenPipeError",
    "TimeoutError",
    "AssertionError",
    "NotImplementedError",
    "ReferenceError",
]
_VALUES = (
    "open('/dev/null')", "object()", "(x for x in 'ab')", "float('inf')", "10**5000", "[[]] * 9999", "b'\\xff' * 999",
    "'\\ud800'", "'<|im_end|>'", "{(1, 2): 3}", "type", "Ellipsis", "1j", "range(9)", "memoryview(b'a')",
    "'\\x00' * 999", "'\\n' * 99999", "__import__('os')", "set()", "print", "'é' * 99999", "None",
)  # fmt: skip
SLOW = (
    {f"raises {name}": (f"raise {name}()", "error") for name in _EXCEPTIONS}
    | {f"returns {value}": (f"result = {value}", None) for value in _VALUES}
    | {f"signal {n}": (f"import os; os.kill(os.getpid(), {n})", None) for n in range(1, 16) if n not in (9, 15)}
    | {f"exit {n}": (f"import os; os._exit({n})", "error") for n in (1, 2, 77, 127, 255)}
    | {f"descriptor {n}": (f"import os; os.dup2(os.open('/dev/zero', 0), {n})", None) for n in range(3, 18)}
    | {
        "bad str": ("class E(Exception):\n  def __str__(self): 1/0\nraise E()", "error"),
        "self-referring": ("result = []; result.append(result)", "ok"),
        "deep list": ("result = []\nfor _ in range(9999): result = [result]", None),
        "descriptors": ("import os; x = [os.open('/dev/null', 0) for _ in range(500)]", "ok"),
        "stopped": ("import os; os.kill(os.getpid(), 19)", "timeout"),
        "fork": ("import os\nif os.fork() == 0:\n  while True: pass", "ok"),
    }
)


def _check(user, session, code, status):
    result = call(session, "hostile", code=code)
    assert result.status == status or (status is None and result.status != "infra"), result
    assert call(session, "search", query="a", top=1).text == '["a 0"]'


@pytest.mark.parametrize("name", FAST)
def test_a_hostile_tool_ends_its_own_call_and_the_next_one_works(user, session, name):
    _check(user, session, *FAST[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_a_hundred_hostile_tools_end_their_own_calls(user, session, name):
    _check(user, session, *SLOW[name])


def test_hostile_calls_leave_no_process_and_no_descriptor():
    made = tools.UserTools(["user_tools.py:hostile", "user_tools.py:Notebook"], SETTINGS, BESIDE)
    descriptors = len(os.listdir("/proc/self/fd"))
    mark = f"7{os.getpid()}"
    for style in ("'sleep'", "'setsid', 'sleep'"):
        for name in ("hostile", "run"):
            session = made.open({})
            call(session, name, code=f"import subprocess; subprocess.Popen([{style}, '{mark}'])")
            session.close()
    call(session := made.open({}), "run", code=f"import subprocess; subprocess.Popen(['sleep', '{mark}'])")
    assert len(os.listdir("/proc/self/fd")) == descriptors
    made.close()
    _until(lambda: not _sleepers(mark))


def _sleepers(mark):
    found = []
    for entry in Path("/proc").iterdir():
        try:
            found += [entry.name] if mark.encode() in (entry / "cmdline").read_bytes().split(b"\0") else []
        except OSError:
            continue
    return found


def _until(condition, seconds=3.0):
    end = time.perf_counter() + seconds
    while not condition():
        assert time.perf_counter() < end
        time.sleep(0.01)
