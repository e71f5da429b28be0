"""The system-call filter of a program: an allowlist, default EPERM; other architectures are killed.

The classic-BPF program is a binary search over the allowed numbers, so that the kernel's own cost to install it (it
tries every number once) and to run it stays small. It is built once in the zygote; a child only writes its process id
into it and installs it. Threads are allowed, processes are not: without CLONE_THREAD clone is refused, and clone3,
whose flags a filter cannot see, answers ENOSYS, on which C libraries fall back to clone.
"""

from __future__ import annotations

import ctypes
import errno

from sandbox.layers import kernel
from sandbox.layers.syscalls import ALLOWED, ARCHITECTURES, CONDITIONAL, METADATA, numbers

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _JUMP, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x05, 0x06
_ALLOW, _KILL = 0x7FFF0000, 0x80000000
_REFUSE, _ABSENT = 0x00050000 | errno.EPERM, 0x00050000 | 38  # ENOSYS, whose number macOS differs in
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16
_AUDIT = (0xC000003E, 0xC00000B7)  # x86_64, aarch64
_X32 = 0x40000000
_THREAD, _NEW_ANYTHING = 0x00010000, 0x7E020080
_IOCTLS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # TCGETS, window size, FIONREAD, FIONBIO, close-on-exec
_PRCTLS = (3, 15, 16, 0x53564D41)  # read dumpable; write and read a thread's name; name memory
_OWN_PID, _OWN_GROUP = 0x7FFFFFF1, 0x7FFFFFF2  # placeholders until the child knows its number

Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, constant


class _Filter(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint16), ("jt", ctypes.c_uint8), ("jf", ctypes.c_uint8), ("k", ctypes.c_uint32)]


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.POINTER(_Filter))]


class SystemCallFilter:
    """The filter for this machine, ready to be installed in forked children."""

    def __init__(self, own_root: bool):
        """`own_root`: the program sees a private root, so that it may change metadata by path."""
        instructions = build(kernel.MACHINE, own_root)
        self._array = (_Filter * len(instructions))(*(_Filter(*row) for row in instructions))
        self._program = _Program(len(instructions), self._array)
        self._pids = [self._array[i] for i, row in enumerate(instructions) if row[3] == _OWN_PID]
        self._groups = [self._array[i] for i, row in enumerate(instructions) if row[3] == _OWN_GROUP]

    def install(self, pid: int) -> None:
        """For this process, for good; `pid` is the only process that it may send signals to. Raises OSError."""
        for instruction in self._pids:
            instruction.k = pid
        for instruction in self._groups:
            instruction.k = -pid & 0xFFFFFFFF
        kernel.no_new_privileges()
        kernel.set_seccomp_filter(self._program)


def build(machine: str, own_root: bool) -> list[Instruction]:
    """The whole program for x86_64 or aarch64, with placeholders for the process id."""
    leaves: dict[int, list[Instruction]] = {}
    for number in numbers(ALLOWED + METADATA * own_root, machine).values():
        leaves[number] = [(_RETURN, 0, 0, _ALLOW)]
    conditions = _conditions()
    for name, number in numbers(CONDITIONAL, machine).items():
        leaves[number] = conditions[name]
    refuse = [(_RETURN, 0, 0, _REFUSE)]
    segments = [(0, refuse)]  # from this number on: these instructions
    for number in sorted(leaves):
        if segments[-1][0] == number:
            segments.pop()
        if not segments or segments[-1][1] != leaves[number]:
            segments.append((number, leaves[number]))
        segments.append((number + 1, refuse))
    head = [
        (_LOAD, 0, 0, _ARCHITECTURE_AT),
        (_EQUAL, 1, 0, _AUDIT[ARCHITECTURES[machine]]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER_AT),
        (_AT_LEAST, 0, 1, _X32),
        (_RETURN, 0, 0, _KILL),
    ]
    return head + _search(segments)


def _search(segments: list[tuple[int, list[Instruction]]]) -> list[Instruction]:
    """Binary search by the loaded number; adjacent equal segments have been merged."""
    if len(segments) == 1:
        return segments[0][1]
    middle = len(segments) // 2
    left, right = _search(segments[:middle]), _search(segments[middle:])
    if len(left) <= 255:
        return [(_AT_LEAST, len(left), 0, segments[middle][0]), *left, *right]
    return [(_AT_LEAST, 0, 1, segments[middle][0]), (_JUMP, 0, 0, len(left)), *left, *right]


def _conditions() -> dict[str, list[Instruction]]:
    return {
        "clone": [
            (_LOAD, 0, 0, _ARGUMENTS_AT),
            (_ANY_BIT, 2, 0, _NEW_ANYTHING),
            (_ANY_BIT, 0, 1, _THREAD),
            (_RETURN, 0, 0, _ALLOW),
            (_RETURN, 0, 0, _REFUSE),
        ],
        "clone3": [(_RETURN, 0, 0, _ABSENT)],
        "kill": _one_of(0, (_OWN_PID, _OWN_GROUP, 0)),
        "tgkill": _one_of(0, (_OWN_PID,)),
        "ioctl": _one_of(1, _IOCTLS),
        "prctl": _one_of(0, _PRCTLS),
        "prlimit64": _one_of(0, (0,)),
        "socketpair": _one_of(0, (1,)),  # AF_UNIX: an event loop's own wake-up pair
        "sendto": [  # without an address: to the pair's other end only
            (_LOAD, 0, 0, _ARGUMENTS_AT + 8 * 4),
            (_EQUAL, 0, 3, 0),
            (_LOAD, 0, 0, _ARGUMENTS_AT + 8 * 4 + 4),
            (_EQUAL, 0, 1, 0),
            (_RETURN, 0, 0, _ALLOW),
            (_RETURN, 0, 0, _REFUSE),
        ],
    }


def _one_of(argument: int, values: tuple[int, ...]) -> list[Instruction]:
    """Allows the call when the low half of an argument is one of `values` (the kernel reads 32 bits of these)."""
    rows: list[Instruction] = [(_LOAD, 0, 0, _ARGUMENTS_AT + 8 * argument)]
    rows += [(_EQUAL, len(values) - i, 0, value) for i, value in enumerate(values)]
    return [*rows, (_RETURN, 0, 0, _REFUSE), (_RETURN, 0, 0, _ALLOW)]
