"""Resource limits and the environment of zygote and children; layers 1 and 2 of the box, present on every system."""

from __future__ import annotations

import contextlib
import os
import resource
import sys

ZYGOTE_FDS = 64  # a zygote holds fewer descriptors than this
CODE_BYTES = 64 << 10
OUTPUT_BYTES = 8 << 20  # both streams together; a call that writes more is ended
FILE_BYTES = 64 << 20
HEADROOM_BYTES = 64 << 20  # address space kept back to format a MemoryError
STACK_BYTES = 8 << 20
OPEN_FILES = 64

ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "TZ": "UTC",  # a replay on another host prints the same
    "PYTHONHASHSEED": "0",
    "OPENBLAS_NUM_THREADS": "1",  # a library thread in the zygote would be missing in every child
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "2",  # each arena reserves 64 MiB of the address space that RLIMIT_AS counts
}


SCRATCH_VARIABLES = ("HOME", "TMPDIR", "MPLCONFIGDIR")  # set to the call's own folder


def apply(address_space: int, tasks: int) -> None:
    """Limits this process for good: `address_space` bytes (and HEADROOM_BYTES kept back), `tasks` of its user.

    With tasks 0 neither a process nor a thread can be started, except by root of the host.
    """
    _limit(resource.RLIMIT_AS, address_space, address_space + HEADROOM_BYTES)
    _limit(resource.RLIMIT_FSIZE, FILE_BYTES, FILE_BYTES)
    _limit(resource.RLIMIT_STACK, STACK_BYTES, STACK_BYTES)
    _limit(resource.RLIMIT_CORE, 0, 0)
    _limit(resource.RLIMIT_MEMLOCK, 0, 0)
    _limit(resource.RLIMIT_NOFILE, OPEN_FILES, OPEN_FILES)
    _limit(resource.RLIMIT_NPROC, tasks, tasks)


def _limit(kind: int, soft: int, hard: int) -> None:
    """Sets a limit, or keeps the lower one that the host has set already."""
    top = resource.getrlimit(kind)[1]
    if top != resource.RLIM_INFINITY:
        hard = min(hard, top)
    soft = min(soft, hard)
    try:
        resource.setrlimit(kind, (soft, hard))
    except (OSError, ValueError):
        if sys.platform == "linux":
            raise
        # macOS knows some limits by name only; the probe finds out and the report says so.


def limit_processor_time(seconds: int) -> None:
    """The kernel kills this process when it has used so much, counted from its start."""
    _limit(resource.RLIMIT_CPU, seconds, seconds)


def allow_headroom() -> None:
    """Opens the kept-back address space, so that the report of a MemoryError does not fail for lack of memory."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    _limit(resource.RLIMIT_AS, hard, hard)


def disk_bytes(folder: str) -> int:
    """What the files below `folder` take on disk; files that vanish meanwhile count nothing."""
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(path, name)).st_blocks * 512
    return total
