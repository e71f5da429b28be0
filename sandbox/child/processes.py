"""Clear words where a program tries to start a process: the kernel would refuse it too, but with a bare EPERM."""

from __future__ import annotations

import _posixsubprocess
import _thread
import errno
import os
import sys

_NAMES = ("fork", "forkpty", "posix_spawn", "posix_spawnp", "system", "execv", "execve")


class Refused(PermissionError):
    """What a program may not do; to the program it is a PermissionError, to the tool a refusal."""


Refused.__qualname__, Refused.__module__ = "PermissionError", "builtins"  # as its traceback names it


def _no_process(*_: object, **__: object) -> int:
    raise Refused(errno.EPERM, "starting processes is not allowed here")


def _no_thread(*_: object, **__: object) -> int:
    raise Refused(errno.EPERM, "starting threads is not allowed here")


def refuse(threads: bool) -> None:
    """Replaces what starts processes (and threads) in this interpreter, for programs. No layer, only an answer."""
    for name in _NAMES:
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
