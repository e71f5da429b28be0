"""Runs a command as an ordinary user, from root, in a mount namespace where that user can reach the interpreter.

    python sandbox_user.py COMMAND...

A root shell's interpreter often lies below a folder that only root may enter; such folders are replaced by empty ones
that hold nothing but what the command needs.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from sandbox.layers import kernel  # noqa: E402

UID = 65533


def _open_up(needed: list[str]) -> None:
    """Mounts an empty folder over each closed ancestor and binds the needed paths below it again."""
    kernel.unshare(kernel.NEW_MOUNT)
    kernel.mount("none", "/", None, kernel.RECURSIVE | kernel.PRIVATE)
    closed = {str(up) for path in needed for up in Path(path).parents if not up.stat().st_mode & 0o001}
    for folder in sorted(closed, key=len):
        inside = {path: os.open(path, os.O_PATH) for path in needed if path.startswith(folder + "/")}
        kernel.mount("tmpfs", folder, "tmpfs", 0, "mode=755")
        for path, fd in inside.items():
            os.makedirs(path, exist_ok=True)
            kernel.mount(f"/proc/self/fd/{fd}", path, None, kernel.BIND | kernel.RECURSIVE)
            os.close(fd)


if __name__ == "__main__":
    _open_up([sys.base_prefix, sys.prefix, str(ROOT)])
    os.setgroups([])
    os.setresgid(UID, UID, UID)
    os.setresuid(UID, UID, UID)
    os.environ["HOME"] = "/nonexistent"
    os.execv(sys.argv[1], sys.argv[1:])
