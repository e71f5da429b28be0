"""Linux calls that Python 3.11's standard library lacks, through ctypes. Each raises OSError with its own name in it.

Importable everywhere; on another system or machine SUPPORTED is False and nothing here may be called.
"""

from __future__ import annotations

import ctypes
import os
import sys

from sandbox.layers.syscalls import ARCHITECTURES

MACHINE = os.uname().machine
SUPPORTED = sys.platform == "linux" and MACHINE in ARCHITECTURES and ctypes.sizeof(ctypes.c_void_p) == 8

NEW_MOUNT, NEW_UTS, NEW_IPC, NEW_USER, NEW_PID, NEW_NET = (
    0x00020000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000,
)  # fmt: skip
READ_ONLY, NO_SUID, NO_DEV, NO_EXEC, REMOUNT, BIND, RECURSIVE, PRIVATE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18
DETACH = 2
_PDEATHSIG, _SET_DUMPABLE, _NO_NEW_PRIVS, _SET_SECCOMP = 1, 4, 38, 22

_libc = ctypes.CDLL(None, use_errno=True)
_syscall = _libc.syscall
_syscall.restype = ctypes.c_long
if SUPPORTED:
    _libc.prctl.argtypes = [ctypes.c_int] + [ctypes.c_ulong] * 4
_NUMBERS = {"pivot_root": (155, 41), "capset": (126, 91), "mount_setattr": (442, 442)}


class _CapHeader(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]


class _CapData(ctypes.Structure):
    _fields_ = [("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32)]


class _MountAttr(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("attr_set", "attr_clr", "propagation", "userns_fd")]


# Made once, before the fork, so that a child touches as little memory as possible.
_NO_CAPS = (_CapHeader(0x20080522, 0), (_CapData * 2)())


def call(name: str, number: int, *args: object) -> int:
    """A raw system call; integers and pointers only. Returns its result, raises OSError for -1."""
    result = _syscall(ctypes.c_long(number), *args)
    if result < 0:
        _fail(name)
    return result


def _fail(name: str) -> None:
    number = ctypes.get_errno()
    raise OSError(number, f"{name}: {os.strerror(number)}")


def _number(name: str) -> int:
    return _NUMBERS[name][ARCHITECTURES[MACHINE]]


def unshare(flags: int) -> None:
    if _libc.unshare(flags):
        _fail("unshare")


def mount(source: str, target: str, kind: str | None, flags: int, data: str = "") -> None:
    if _libc.mount(
        source.encode(), target.encode(), kind.encode() if kind else None, ctypes.c_ulong(flags), data.encode()
    ):
        _fail(f"mount {target}")


def make_read_only(target: str) -> None:
    """The mount at `target` and all below it. Raises OSError (ENOSYS before Linux 5.12)."""
    attributes = _MountAttr(READ_ONLY | NO_SUID, 0, 0, 0)
    at_recursive, at_fdcwd = 0x8000, -100
    call("mount_setattr", _number("mount_setattr"), at_fdcwd, target.encode(), at_recursive, ctypes.byref(attributes),
         ctypes.sizeof(attributes))  # fmt: skip


def unmount(target: str) -> None:
    if _libc.umount2(target.encode(), DETACH):
        _fail(f"umount {target}")


def pivot_root(new: str, old: str) -> None:
    call("pivot_root", _number("pivot_root"), new.encode(), old.encode())


def drop_capabilities() -> None:
    if _syscall(ctypes.c_long(_number("capset")), ctypes.byref(_NO_CAPS[0]), ctypes.byref(_NO_CAPS[1])):
        _fail("capset")


def die_with_parent() -> None:
    """The kernel kills this process when the thread that forked it ends. A change of credentials clears this."""
    _prctl(_PDEATHSIG, 9)


def set_dumpable(value: int) -> None:
    _prctl(_SET_DUMPABLE, value)


def no_new_privileges() -> None:
    _prctl(_NO_NEW_PRIVS, 1)


def set_seccomp_filter(program: ctypes.Structure) -> None:
    _prctl(_SET_SECCOMP, 2, ctypes.addressof(program))


def _prctl(option: int, first: int, second: int = 0) -> None:
    if _libc.prctl(option, first, second, 0, 0):
        _fail(f"prctl {option}")
