"""Runs one program in this process, as `python file.py` would, and says how it ended.

The program gets a fresh `__main__`, a traceback cache entry for `<python>`, seeded random numbers and line-buffered
output. `random`, numpy's global state and default_rng() follow the call's seed, so a replay of a trajectory prints the
same; os.urandom, secrets and uuid promise real randomness and keep it. What a program leaves behind does not matter:
the process is used once. Left out on purpose: finalizers of objects that are alive at exit do not run, since a hanging
`__del__` must not turn a finished program into a timeout.
"""

from __future__ import annotations

import _ast
import _posixsubprocess
import _sitebuiltins
import _thread
import atexit
import builtins
import contextlib
import errno
import io
import linecache
import os
import random
import sys
import traceback
import types
from typing import Any, NamedTuple, TextIO, cast

from sandbox import control
from sandbox.child import imports
from sandbox.layers import limits

FILE = "<python>"  # the program's file name in tracebacks
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


class Outcome(NamedTuple):
    letter: bytes  # one of control.STATUS
    error_type: str = ""
    exit_code: int = 0
    shown: bool = False  # a bare last expression was printed


def prepare() -> None:
    """Once, in the fork server: the standard streams of all children, and warm caches for the common path.

    Descriptor 1 leads nowhere here. Measured: a fifth less CPU per call than without the rehearsal.
    """
    streams = {
        "stdin": io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)), encoding="utf-8"),  # /dev/null
        "stdout": _writer(1),
        "stderr": _writer(2),
    }
    for name, stream in streams.items():
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    for name in ("exit", "quit"):
        setattr(builtins, name, _sitebuiltins.Quitter(name, ""))
    builtins.help = _sitebuiltins._Helper()
    main = sys.modules["__main__"]
    finders = list(sys.meta_path)
    for code in (b"print(47*83+29)", b"import math\nprint(math.sqrt(2))") * 10:  # code is specialized after eight runs
        run(code, 0, False, True, wind_down=False)  # children need their threads and atexit functions
    sys.modules["__main__"] = main
    sys.meta_path[:] = finders


def _writer(fd: int) -> io.TextIOWrapper:
    return io.TextIOWrapper(
        io.BufferedWriter(io.FileIO(fd, "w", closefd=False)),
        encoding="utf-8",
        errors="backslashreplace",
        line_buffering=True,
    )


def run(code: bytes, seed: int, show_last: bool, filter_imports: bool, *, wind_down: bool = True) -> Outcome:
    """Executes UTF-8 source (lone surrogates allowed) and returns its outcome; output is flushed when it returns."""
    stdout, stderr = sys.stdout, sys.stderr
    try:
        outcome = _run(code, seed, show_last, filter_imports)
    except BaseException as error:  # whatever a program raises is its own result, never this process's failure
        outcome = _report(error, stderr)
    if wind_down:
        _wind_down()
    for written in {stdout, stderr, sys.stdout, sys.stderr}:
        with contextlib.suppress(OSError, ValueError, AttributeError):  # the program closed or replaced it
            written.flush()
    return outcome


def _run(code: bytes, seed: int, show_last: bool, filter_imports: bool) -> Outcome:
    text = unwrap(code.decode("utf-8", "surrogatepass"))
    linecache.cache[FILE] = (len(text), None, text.splitlines(keepends=True), FILE)
    filter_imports = filter_imports and imports.may_refuse(text)
    body, last = parse(text, FILE, show_last, filter_imports)
    if filter_imports:
        refusal = imports.refusal(body, last)
        if refusal:
            sys.stderr.write(f"Refused: {refusal}\n")
            return Outcome(control.REFUSED, "Refused")
    program = _compiled(body, FILE, "exec")
    expression = _compiled(last, FILE, "eval") if last is not None else None  # before anything runs
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    _seed(seed)
    exec(program, main.__dict__)
    if expression is None:
        return Outcome(control.OK)
    value = eval(expression, main.__dict__)
    if value is not None:
        sys.stdout.write(f"{value!r}\n")
    return Outcome(control.OK, shown=value is not None)


def _wind_down() -> None:
    """What the interpreter does at exit, inside the call's limits: wait for threads, run atexit functions."""
    threading = sys.modules.get("threading")
    if threading is not None:
        threading._shutdown()
    atexit._run_exitfuncs()


def _report(error: BaseException, stderr: TextIO) -> Outcome:
    if isinstance(error, SystemExit):
        return _exit(error, stderr)
    limits.allow_headroom()
    stderr.write("".join(_traced(error).format()))
    if isinstance(error, Refused):
        return Outcome(control.REFUSED, "Refused")
    letter = control.OUT_OF_MEMORY if isinstance(error, MemoryError) else control.ERROR
    return Outcome(letter, type(error).__name__)


def _traced(error: BaseException) -> traceback.TracebackException:
    """Python's own traceback, of the error and of those it came from, without the frames of this package."""
    traced = traceback.TracebackException.from_exception(error, compact=True)
    todo: list[traceback.TracebackException | None] = [traced]
    seen = set()
    while todo:
        one = todo.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        frames = [frame for frame in one.stack if not frame.filename.startswith(_OURS)]
        if len(frames) < len(one.stack):
            one.stack = traceback.StackSummary.from_list(frames)
        todo += [one.__cause__, one.__context__, *(getattr(one, "exceptions", None) or ())]
    return traced


def _exit(error: SystemExit, stderr: TextIO) -> Outcome:
    code = error.code
    if code is None or code == 0:
        return Outcome(control.OK)
    if not isinstance(code, int):
        stderr.write(f"{code}\n")
        code = 1
    return Outcome(control.EXIT, "SystemExit", code & 0xFF)


def unwrap(text: str) -> str:
    """Removes a byte-order mark, and a Markdown fence that is opened on the first line and closed on the last."""
    text = text.removeprefix("\ufeff")
    opening, _, rest = text.strip().partition("\n")
    body, newline, closing = rest.rpartition("\n")
    for mark in "`~":
        fence = mark * (len(opening) - len(opening.lstrip(mark)))
        info = opening[len(fence) :]
        if len(fence) >= 3 and mark not in info and closing.startswith(fence) and not closing.strip(mark + " "):
            return body + newline
    return text


def parse(
    text: str, file: str, show_last: bool, tree: bool
) -> tuple[types.CodeType | _ast.Module, _ast.Expression | None]:
    """(program, last expression or None); the program stays a tree where someone looks at it, else it is code.

    Raises what Python's own compiler raises.
    """
    if not (show_last or tree):
        return compile(text, file, "exec", dont_inherit=True), None
    module = cast(_ast.Module, compile(text, file, "exec", _ast.PyCF_ONLY_AST, dont_inherit=True))
    end = module.body[-1] if show_last and module.body else None
    if not isinstance(end, _ast.Expr):
        return module, None
    del module.body[-1]
    return module, _ast.Expression(end.value)


def _compiled(program: types.CodeType | _ast.Module | _ast.Expression, file: str, mode: str) -> types.CodeType:
    if isinstance(program, types.CodeType):
        return program
    return compile(program, file, mode, dont_inherit=True)


def _seed(value: int) -> None:
    """Seeds `random` now, numpy.random now or when the program imports it."""
    random.seed(value)
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        _seed_numpy(numpy_random, value)
    else:
        sys.meta_path.insert(0, _SeedAtImport(value))


def _seed_numpy(numpy_random: types.ModuleType, value: int) -> None:
    numpy_random.seed(value % 2**32)
    # An unseeded default_rng() draws its entropy here.
    numpy_random.bit_generator.randbits = random.Random(value).getrandbits


class _SeedAtImport:
    """A finder that lets the usual ones find numpy.random and seeds it once it is loaded."""

    def __init__(self, value: int):
        self._value = value

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != "numpy.random":
            return None
        sys.meta_path.remove(self)
        spec = sys.meta_path[-1].find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_seed(module: types.ModuleType) -> None:
                load(module)
                _seed_numpy(module, self._value)

            vars(spec.loader)["exec_module"] = load_and_seed
        return spec


_STARTERS = ("fork", "forkpty", "posix_spawn", "posix_spawnp", "system", "execv", "execve")


class Refused(PermissionError):
    """What a program may not do; to the program it is a PermissionError, to the tool a refusal."""


Refused.__qualname__, Refused.__module__ = "PermissionError", "builtins"  # as its traceback names it


def _no_process(*_: object, **__: object) -> int:
    raise Refused(errno.EPERM, "starting processes is not allowed here")


def _no_thread(*_: object, **__: object) -> int:
    raise Refused(errno.EPERM, "starting threads is not allowed here")


def refuse_processes(threads: bool) -> None:
    """Replaces what starts processes (and threads) in this interpreter, for programs. No layer, only an answer: the
    kernel would refuse too, but with a bare EPERM."""
    for name in _STARTERS:
        if hasattr(os, name):
            setattr(os, name, _no_process)
    _posixsubprocess.fork_exec = _no_process
    loaded = sys.modules.get("subprocess")
    if loaded is not None:
        vars(loaded)["_fork_exec"] = _no_process
    if threads:
        for name in ("start_new_thread", "start_new", "start_joinable_thread"):  # the last since Python 3.13
            for module, prefix in ((_thread, ""), (sys.modules.get("threading"), "_")):
                if hasattr(module, prefix + name):
                    setattr(module, prefix + name, _no_thread)
