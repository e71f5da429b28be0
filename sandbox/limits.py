"""Resource limits and the environment of zygote and children; layers 1 and 2 of the box, present on every system."""

from __future__ import annotations

import resource
from typing import NamedTuple

ZYGOTE_FDS = 64  # a zygote holds fewer descriptors than this
CODE_BYTES = 64 << 10
OUTPUT_BYTES = 8 << 20  # both streams together; a call that writes more is ended
FILE_BYTES = 64 << 20
HEADROOM_BYTES = 64 << 20  # address space kept back to format a MemoryError
OPEN_FILES = 64

ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "OPENBLAS_NUM_THREADS": "1",  # a library thread in the zygote would be missing in every child
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "2",  # each arena reserves 64 MiB of the address space that RLIMIT_AS counts
}


class Settings(NamedTuple):
    """What a zygote tells its children once."""

    address_space: int  # bytes: the zygote's own size plus tool.memory_mb
    tasks: int  # processes and threads of the sandbox's user


def apply(settings: Settings) -> None:
    """Sets the limits of this process for good (the address space keeps HEADROOM_BYTES above the soft limit)."""
    limit = resource.setrlimit
    soft = settings.address_space
    limit(resource.RLIMIT_AS, (soft, soft + HEADROOM_BYTES))
    limit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
    limit(resource.RLIMIT_CORE, (0, 0))
    limit(resource.RLIMIT_NOFILE, (OPEN_FILES, OPEN_FILES))
    limit(resource.RLIMIT_NPROC, (settings.tasks, settings.tasks))


def allow_headroom() -> None:
    """Opens the kept-back address space, so that the report of a MemoryError does not fail for lack of memory."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
