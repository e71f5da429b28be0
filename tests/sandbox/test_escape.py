"""Ways out that the corpus does not hold, tried through the tool with the import filter off."""

import os
import socket
import sys
import threading

import pytest

import config
import tools

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernel layers are Linux's")
SETTINGS = config.ToolConfig(preload=(), max_running=2, import_filter="off", timeout_seconds=5.0)
TRY = "\n".join(
    ["def attempt(f):", "    try: return 'DONE ' + str(f())", "    except OSError as e: return type(e).__name__"]
)


@pytest.fixture(scope="module")
def tool():
    made = tools.PythonTool(SETTINGS)
    yield made
    made.close()


@pytest.fixture(scope="module")
def bare():
    made = tools.PythonTool(SETTINGS, without=("namespaces", "landlock", "seccomp", "identity"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def listening():
    """A TCP port and an abstract socket of the host, accepting."""
    tcp = socket.create_server(("127.0.0.1", 0))
    abstract = socket.socket(socket.AF_UNIX)
    name = f"escape-{os.getpid()}"
    abstract.bind("\0" + name)
    abstract.listen()
    yield tcp.getsockname()[1], name
    tcp.close()
    abstract.close()


@pytest.mark.parametrize("kind", ["tcp", "abstract"])
def test_the_host_s_sockets_are_out_of_reach_and_would_be_in_reach_without_the_layers(tool, bare, listening, kind):
    port, name = listening
    target = f"('127.0.0.1', {port})" if kind == "tcp" else repr("\0" + name)
    family = "AF_INET" if kind == "tcp" else "AF_UNIX"
    code = f"{TRY}\nimport socket\nprint(attempt(lambda: socket.socket(socket.{family}).connect({target})))"
    assert bare(code) == "DONE None"
    assert tool(code) == "PermissionError"


@pytest.mark.parametrize(
    "expression",
    [
        "libc.fork()",
        "libc.syscall(57)",
        "libc.execve(b'/bin/true', None, None)",
        "libc.socket(2, 1, 0)",
        "libc.syscall(319, b'x', 0)",
        "libc.kill(1, 9)",
        "libc.kill(-1, 9)",
        "libc.prctl(38, 0, 0, 0, 0)",
        "libc.setns(0, 0)",
        "libc.personality(0)",
        "libc.prlimit(1, 7, None, None)",
        "libc.syscall(56, 0x01200011, 0, 0, 0, 0)",
        "libc.mknod(b'dev', 0o20666, 0x0103)",
    ],
)
def test_raw_calls_through_c_fail(tool, expression):
    if os.uname().machine != "x86_64" and "syscall" in expression:
        pytest.skip("numbers of x86_64")
    result = tool.submit(f"import ctypes\nlibc = ctypes.CDLL(None)\nprint({expression})").result()
    assert (result.status, result.text) == ("ok", "-1")


def test_one_call_finds_nothing_of_another_in_its_memory(tool):
    secret = "heap-" + "canary-93b1"
    assert tool(f"x = {secret!r}\nprint(len(x))") == str(len(secret))
    code = (
        "import gc, sys, linecache\n"
        "word = 'canary-' + str(93)\n"
        "places = [*gc.get_objects(), linecache.cache, *(vars(m) for m in list(sys.modules.values()))]\n"
        "print(sum(word + 'b1' in str(place) for place in places if isinstance(place, (dict, list, tuple, str))))"
    )
    assert tool(code) == "0"


def test_calls_that_run_at_once_do_not_see_each_other_s_files(tool):
    write = "import time\nopen('/tmp/mark', 'w').write('x')\ntime.sleep(0.4)\nprint('wrote')"
    look = "import time, os\ntime.sleep(0.2)\nprint(os.listdir('/tmp'), os.listdir('/dev/shm'))"
    first, second = tool.submit(write), tool.submit(look)
    assert (first.result().text, second.result().text) == ("wrote", "[] []")


def test_what_a_program_sees_of_the_host_is_the_interpreter_and_nothing_else(tool):
    seen = tool("import os\nprint(os.getuid(), *sorted(os.listdir('/')))").split()
    assert seen[0] == "64000" and {"proc", "sys", "home", "var", "boot"}.isdisjoint(seen)
    assert tool("import os\nprint(os.path.exists('/etc/passwd'))") == "False"
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    assert tool(f"import os\nprint(os.path.exists({here + '/tools.py'!r}))") == "False"
    assert tool("import os\nprint(sorted(os.environ))") == (
        "['HOME', 'LANG', 'MALLOC_ARENA_MAX', 'MKL_NUM_THREADS', 'MPLCONFIGDIR', 'OMP_NUM_THREADS', "
        "'OPENBLAS_NUM_THREADS', 'PATH', 'PYTHONHASHSEED', 'TMPDIR', 'TZ']"
    )


def test_a_program_cannot_raise_its_own_limits_for_memory_files_and_scratch(tool):
    code = (
        f"{TRY}\nimport resource, os\n"
        "hard = resource.getrlimit(resource.RLIMIT_AS)[1]\n"
        "def more():\n    try: resource.setrlimit(resource.RLIMIT_AS, (2 * hard, 2 * hard))\n"
        "    except ValueError: raise OSError\n"
        "print(attempt(more))\n"
        "print(attempt(lambda: [os.open('/dev/null', 0) for _ in range(100)]))\n"
        "def fill():\n    with open('f', 'wb') as f:\n        for _ in range(80): f.write(bytes(1 << 20))\n"
        "print(attempt(fill))"
    )
    assert tool(code) == "OSError\nOSError\nOSError"


def test_a_hanging_thread_and_a_thread_bomb_end_with_the_call(tool):
    bomb = (
        "import threading, time\n"
        "try:\n    while True: threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
        "except RuntimeError: print('stopped', threading.active_count() < 300)"
    )
    assert tool.submit(bomb).result().text == "stopped True"
    assert tool("print(1)") == "1"


@pytest.mark.parametrize(
    ("code", "status", "text"),
    [
        ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", "crash", "Crashed: signal SIGKILL"),
        ("import os, signal\nos.killpg(0, signal.SIGTERM)", "crash", "Crashed: signal SIGTERM"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)", "timeout", "TimeoutError"),
        ("import ctypes\nctypes.string_at(0)", "crash", "Crashed: signal SIGSEGV"),
        ("import sys\nsys.setrecursionlimit(10**9)\nf = lambda x: [f(x)]\nf(1)", None, ""),
        ("import os\nprint('x')\nos.close(3)", "exit", "x\nExited with status 0"),
        (
            "import atexit\nprint('x')\natexit.register(lambda: [0 for _ in iter(int, 1)])",
            "timeout",
            "x\nTimeoutError",
        ),
        ("import sys\nsys.stdin.read() + 'end'\nprint(open(0).read() == '')", "ok", "True"),
        ("print('\\ud800', '\\x85')", "ok", "\\ud800 \\x85"),
        ("import sys\nsys.stdout.buffer.write(b'\\xff\\xfe ok')", "ok", "\\xff\\xfe ok"),
        ("import os\nos.write(2, b'e' * 10**7)", "output_limit", "eee"),
        ("import numpy as np\nnp.zeros((60000, 60000))", "out_of_memory", "Traceback"),
    ],
)
def test_odd_ends_have_their_status(tool, code, status, text):
    result = tool.submit(code, timeout=1.0 if status in ("timeout", None) else None).result()
    assert status is None or (result.status == status and result.text.startswith(text)), result
    assert tool("print(1)") == "1"


def test_a_forged_outcome_misreports_only_itself(tool):
    forge = "import os, time\nprint('x', flush=True)\nos.write(3, b'D0')\ntime.sleep(30)"
    results = [tool.submit(forge), tool.submit("print(2)")]
    assert results[0].result().status == "crash" and results[0].result().wall_s < 4
    assert results[1].result().text == "2"


def test_descriptors_passed_to_the_broker_go_nowhere(tool):
    code = (
        "import socket, array\n"
        "s = socket.socket(fileno=3)\n"
        "try:\n    s.sendmsg([b'x'], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array('i', [0, 1, 2]))])\n"
        "    print('sent')\n"
        "except OSError as e: print(type(e).__name__)"
    )
    assert tool(code) == "PermissionError"


def test_hostile_and_ordinary_calls_side_by_side(tool):
    hostile = [
        "while True: pass",
        "import os\nos.abort()",
        "x = [0] * 10**12",
        "print('y' * 10**8)",
        "import os\nos._exit(9)",
    ]
    futures = [tool.submit(code, timeout=0.3 if "while" in code else None) for code in hostile * 2]
    answers = []
    threads = [threading.Thread(target=lambda i=i: answers.append((i, tool(f"print({i})")))) for i in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answers) == [(i, str(i)) for i in range(20)]
    expected = ["timeout", "crash", "out_of_memory", "output_limit", "exit"]
    assert [future.result().status for future in futures] == expected * 2
