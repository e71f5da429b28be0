"""User, mount, network, IPC, host-name and process namespaces, and the private root that a program sees.

The root is a read-only tmpfs that holds read-only binds of the interpreter and its libraries, three devices, and one
mount point on which every child mounts its own scratch tmpfs. There is no /proc, no home, no project folder, no
network interface. Two ways in: as root (mount first, then become a user of its own, then a user namespace), and as any
user (a user namespace first). Both end as uid UID inside.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket

from sandbox.layers import kernel

UID = 64000  # a number that no distribution gives to anyone; never "nobody", which others share
BOX = "/box"  # the only writable place lies below: Landlock rules name it, the scratch is mounted on SCRATCH
SCRATCH = "/box/tmp"
_SCRATCH_OPTIONS = "size=64m,nr_inodes=4096,mode=700"
_BASE = "/tmp"  # where the new root is put together; private to the new mount namespace
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
_SYSTEM = ("/lib", "/lib32", "/lib64", "/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/local/lib", "/usr/share/zoneinfo",
           "/etc/ld.so.cache")  # fmt: skip
_ALL = kernel.NEW_MOUNT | kernel.NEW_PID | kernel.NEW_NET | kernel.NEW_IPC | kernel.NEW_UTS


def leave(as_root: bool) -> None:
    """Moves this process into new namespaces; its next fork is process 1 of the new process namespace.

    `as_root` takes the first of the two ways in; `enter` needs the same value. Raises OSError.
    """
    uid, gid = os.geteuid(), os.getegid()
    kernel.unshare(_ALL if as_root else _ALL | kernel.NEW_USER)
    if not as_root:
        process = os.open("/proc/self", os.O_RDONLY | os.O_DIRECTORY)
        _write_maps(process, uid, gid)
        os.close(process)
    with contextlib.suppress(OSError):
        socket.sethostname("sandbox")


def enter(readable: list[str], as_root: bool) -> None:
    """Builds the private root, goes there, and ends as an unprivileged user of a user namespace. Raises OSError."""
    process = os.open("/proc/self", os.O_RDONLY | os.O_DIRECTORY)
    _build(readable)
    if as_root:
        become(UID)
        kernel.unshare(kernel.NEW_USER | kernel.NEW_MOUNT)
        _write_maps(process, UID, UID)
    os.close(process)


def become(uid: int) -> None:
    """From root to a user and group of their own, without any other group. Raises OSError."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    kernel.set_dumpable(1)  # else /proc/self still belongs to root


def mount_scratch() -> None:
    """A child's own, empty SCRATCH, gone with the child. Raises OSError."""
    kernel.unshare(kernel.NEW_MOUNT)
    kernel.mount("tmpfs", SCRATCH, "tmpfs", kernel.NO_SUID | kernel.NO_DEV, _SCRATCH_OPTIONS)
    os.chdir(SCRATCH)


def _write_maps(process: int, uid: int, gid: int) -> None:
    for name, text in (("setgroups", "deny"), ("uid_map", f"{UID} {uid} 1"), ("gid_map", f"{UID} {gid} 1")):
        fd = os.open(name, os.O_WRONLY, dir_fd=process)
        try:
            os.write(fd, text.encode())
        finally:
            os.close(fd)


def _build(readable: list[str]) -> None:
    kernel.mount("none", "/", None, kernel.RECURSIVE | kernel.PRIVATE)
    # Opened first, since the new root hides what lies below its place.
    fds = {path: os.open(path, os.O_PATH) for path in (*_sources(readable), *_DEVICES)}
    kernel.mount("tmpfs", _BASE, "tmpfs", kernel.NO_SUID, "size=4m,mode=755")
    for path, fd in fds.items():
        target = _BASE + path
        if os.path.isdir(f"/proc/self/fd/{fd}"):
            os.makedirs(target, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
        kernel.mount(f"/proc/self/fd/{fd}", target, None, kernel.BIND | kernel.RECURSIVE)
        if path not in _DEVICES:
            _make_read_only(target)
        os.close(fd)
    os.makedirs(_BASE + SCRATCH)
    for name in ("/tmp", "/dev/shm"):
        if not os.path.lexists(_BASE + name):
            os.symlink(SCRATCH, _BASE + name)
    old = _BASE + "/old"
    os.mkdir(old)
    kernel.pivot_root(_BASE, old)
    os.chdir("/")
    kernel.unmount("/old")
    os.rmdir("/old")
    kernel.mount("none", "/", None, kernel.REMOUNT | kernel.BIND | kernel.READ_ONLY | kernel.NO_SUID)


def _sources(readable: list[str]) -> list[str]:
    """What to bind, each under its own name and its real one, outer before inner, none below another."""
    names = [path for path in (*_SYSTEM, *readable) if os.path.exists(path)]
    kept: list[str] = []
    for path in sorted({*names, *map(os.path.realpath, names)}):
        if not any(path.startswith(other + "/") for other in kept):
            kept.append(path)
    return kept


def _make_read_only(target: str) -> None:
    try:
        kernel.make_read_only(target)
    except OSError as error:
        if error.errno != errno.ENOSYS:
            raise
        flags = os.statvfs(target).f_flag & (kernel.NO_SUID | kernel.NO_DEV | kernel.NO_EXEC)
        kernel.mount("none", target, None, kernel.REMOUNT | kernel.BIND | kernel.READ_ONLY | flags)
