"""Clear words where a program tries to start a process: the kernel would refuse it too, but with a bare EPERM."""

from __future__ import annotations

import errno
import os
import sys

_NAMES = ("fork", "forkpty", "posix_spawn", "posix_spawnp", "system", "execv", "execve", "popen")


def _refused(*_: object, **__: object) -> None:
    raise PermissionError(errno.EPERM, "starting processes is not allowed here")


def refuse() -> None:
    """Replaces what starts processes in this interpreter, for programs; it is no layer, only an answer."""
    for name in _NAMES:
        if hasattr(os, name):
            setattr(os, name, _refused)
    import _posixsubprocess

    _posixsubprocess.fork_exec = _refused  # type: ignore[assignment]
    loaded = sys.modules.get("subprocess")
    if loaded is not None:
        loaded._fork_exec = _refused  # type: ignore[attr-defined]
