"""Landlock: files by allowed folders, no TCP, signals and abstract sockets kept inside; needs no privilege.

A ruleset is a descriptor; it is built once in the zygote where every child sees the same folders, and each child only
restricts itself with it.
"""

from __future__ import annotations

import ctypes
import os
import stat

from sandbox.layers import kernel

_CREATE, _ADD, _RESTRICT = 444, 445, 446
_READ_FILE, _READ_DIR = 1 << 2, 1 << 3
_READ = _READ_FILE | _READ_DIR
# Write file, remove dir and file, make dir, regular file, fifo and symbolic link, refer, truncate.
_CHANGE = 1 << 1 | 1 << 4 | 1 << 5 | 1 << 7 | 1 << 8 | 1 << 10 | 1 << 12 | 1 << 13 | 1 << 14
_FILE_RIGHTS = 1 << 1 | 1 << 2 | 1 << 14


class _Attributes(ctypes.Structure):
    _fields_ = [("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scoped", ctypes.c_uint64)]


class _Beneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32)]


def abi() -> int:
    """The kernel's Landlock version; 0 where it is absent or switched off."""
    try:
        return kernel.call("landlock", _CREATE, None, ctypes.c_size_t(0), 1)
    except OSError:
        return 0


def ruleset(read: list[str], change: list[str], abi: int) -> int:
    """A descriptor that allows reading below `read` and reading and changing below `change`, executing nowhere.

    Paths may be folders or files. Raises OSError.
    """
    handled = (1 << (13, 14, 15, 15, 16)[min(abi, 5) - 1]) - 1
    attributes = _Attributes(handled, 3 if abi >= 4 else 0, 3 if abi >= 6 else 0)
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8
    ruleset_fd = kernel.call("landlock_create_ruleset", _CREATE, ctypes.byref(attributes), ctypes.c_size_t(size), 0)
    for paths, rights in ((read, _READ), (change, _READ | _CHANGE)):
        for path in paths:
            fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
            try:
                kept = rights if stat.S_ISDIR(os.fstat(fd).st_mode) else rights & _FILE_RIGHTS
                rule = _Beneath(kept & handled, fd)
                kernel.call("landlock_add_rule", _ADD, ruleset_fd, 1, ctypes.byref(rule), 0)
            finally:
                os.close(fd)
    return ruleset_fd


def restrict(ruleset_fd: int) -> None:
    """This thread and its future children, for good; needs no_new_privs. Raises OSError."""
    kernel.call("landlock_restrict_self", _RESTRICT, ruleset_fd, 0)
