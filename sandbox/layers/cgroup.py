"""A control group round a zygote and its children: their memory and tasks together. An extra where it is writable.

Version 2 and version 1 are tried at the usual mount point. Nothing depends on it: each child has its own limits.
"""

from __future__ import annotations

import contextlib
import os
import time

_PREFIX = "python-tool-"
_V2 = "/sys/fs/cgroup"
_V1_MEMORY, _V1_TASKS = "/sys/fs/cgroup/memory", "/sys/fs/cgroup/pids"


def create(name: str, memory_bytes: int, tasks: int) -> list[str]:
    """Makes the group and sets its limits; returns its folders, empty where that is not possible."""
    limits = {"memory.max": memory_bytes, "pids.max": tasks}
    layouts = (
        {_V2: limits},
        {_V1_MEMORY: {"memory.limit_in_bytes": memory_bytes}, _V1_TASKS: {"pids.max": tasks}},
    )
    for layout in layouts:
        folders = []
        try:
            for parent, values in layout.items():
                if not os.path.isfile(os.path.join(parent, "cgroup.procs")):
                    raise FileNotFoundError(parent)
                _sweep(parent)
                folder = os.path.join(parent, _PREFIX + name)
                os.mkdir(folder)
                folders.append(folder)
                for file, value in values.items():
                    _write(os.path.join(folder, file), str(value))
            return folders
        except OSError:
            remove(folders)
    return []


def join(folders: list[str]) -> bool:
    """Moves this process into the group; whether that worked and the limits stand."""
    try:
        for folder in folders:
            _write(os.path.join(folder, "cgroup.procs"), "0")
    except OSError:
        return False
    return bool(folders)


def remove(folders: list[str], patience_s: float = 0.0) -> None:
    """Removes the group's folders, waiting a little for dying processes; what is left goes with the next sweep."""
    end = time.monotonic() + patience_s
    for folder in folders:
        while os.path.isdir(folder):
            with contextlib.suppress(OSError):
                os.rmdir(folder)
                break
            if time.monotonic() >= end:
                break
            time.sleep(0.005)


def _sweep(parent: str) -> None:
    """Removes groups of this broker, or of a dead one, whose processes are all gone."""
    for name in os.listdir(parent):
        owner = name.removeprefix(_PREFIX).partition("-")[0]
        if name.startswith(_PREFIX) and (owner == str(os.getpid()) or not os.path.exists(f"/proc/{owner}")):
            remove([os.path.join(parent, name)])


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="ascii") as file:
        file.write(text)
