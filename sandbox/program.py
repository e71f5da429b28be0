"""Runs one program in this process, as `python file.py` would, and says how it ended.

The program gets a fresh `__main__`, a traceback cache entry for `<python>`, seeded random numbers and line-buffered
output. What it leaves behind does not matter: the process is used once. Left out on purpose: finalizers of objects
that are alive at exit do not run, since a hanging `__del__` must not turn a finished program into a timeout.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import io
import linecache
import random
import sys
import traceback
import types
from typing import NamedTuple

from sandbox import control, imports, limits, source

FILE = "<python>"  # the program's file name in tracebacks
_DEFAULT_HOOK = sys.excepthook


class Outcome(NamedTuple):
    letter: bytes  # one of control.STATUS
    error_type: str = ""
    exit_code: int = 0
    shown: bool = False  # a bare last expression was printed


def run(code: bytes, seed: int, show_last: bool, filter_imports: bool) -> Outcome:
    """Executes UTF-8 source (lone surrogates allowed) and returns its outcome; output is flushed when it returns."""
    stdout, stderr = _open(1), _open(2)
    stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)), encoding="utf-8")  # /dev/null
    for name, stream in (("stdin", stdin), ("stdout", stdout), ("stderr", stderr)):
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    try:
        outcome = _run(code, seed, show_last, filter_imports)
    except BaseException as error:  # whatever a program raises is its own result, never this process's failure
        outcome = _report(error, stderr)
    for written in (sys.stdout, sys.stderr, stdout, stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # the program closed or replaced it
            written.flush()
    return outcome


def _open(fd: int) -> io.TextIOWrapper:
    return io.TextIOWrapper(
        io.BufferedWriter(io.FileIO(fd, "w", closefd=False)),
        encoding="utf-8", errors="backslashreplace", line_buffering=True,
    )  # fmt: skip


def _run(code: bytes, seed: int, show_last: bool, filter_imports: bool) -> Outcome:
    text = source.unwrap(code.decode("utf-8", "surrogatepass"))
    linecache.cache[FILE] = (len(text), None, text.splitlines(keepends=True), FILE)
    body, last = source.parse(text, FILE, show_last, filter_imports)
    if filter_imports:
        refusal = imports.refusal(text, body, last)
        if refusal:
            sys.stderr.write(f"Refused: {refusal}\n")
            return Outcome(control.REFUSED, "Refused")
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    _seed(seed)
    shown = False
    try:
        exec(source.finish(body, FILE, "exec"), main.__dict__)
        if last is not None:
            value = eval(source.finish(last, FILE, "eval"), main.__dict__)
            if value is not None:
                sys.stdout.write(f"{value!r}\n")
                shown = True
    finally:
        _wind_down()
    return Outcome(control.OK, shown=shown)


def _seed(seed: int) -> None:
    random.seed(seed)
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed(seed % 2**32)


def _wind_down() -> None:
    """What the interpreter does at exit, inside the call's limits: wait for threads, run atexit functions."""
    threading = sys.modules.get("threading")
    if threading is not None:
        threading._shutdown()
    atexit._run_exitfuncs()


def _report(error: BaseException, stderr: io.TextIOWrapper) -> Outcome:
    if isinstance(error, SystemExit):
        return _exit(error, stderr)
    limits.allow_headroom()
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != FILE:
        trace = trace.tb_next  # the frames above the program are ours
    stderr.write("".join(traceback.format_exception(type(error), error, trace)))
    letter = control.OUT_OF_MEMORY if isinstance(error, MemoryError) else control.ERROR
    return Outcome(letter, type(error).__name__)


def _exit(error: SystemExit, stderr: io.TextIOWrapper) -> Outcome:
    code = error.code
    if code is None or code == 0:
        return Outcome(control.OK)
    if not isinstance(code, int):
        stderr.write(f"{code}\n")
        code = 1
    return Outcome(control.EXIT, "SystemExit", code & 0xFF)
