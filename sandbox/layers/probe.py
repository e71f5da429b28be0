"""What the host's kernel really refuses: each layer is put on alone in a scratch process that then tries to break out.

A layer counts only when the forbidden thing was tried and refused; version numbers and documentation are not trusted.
`whole` tries everything once more in a child that wears the full plan, as programs do.
"""

from __future__ import annotations

import functools
import mmap
import os
import resource
import socket
from collections.abc import Callable

from sandbox.layers import isolation, kernel, landlock, namespaces, seccomp

_CANARIES = (os.path.abspath(__file__), "/etc/passwd", "/etc/hostname")


class Outside:
    """Things outside the box that a probe tries to reach: a file, a listening port, a process."""

    def __init__(self, readable: list[str]):
        inside = tuple(os.path.realpath(path) + "/" for path in readable)
        self.files = [path for path in _CANARIES if os.path.exists(path) and not path.startswith(inside)]
        self.pid = os.getpid()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = self.listener.getsockname()

    def close(self) -> None:
        self.listener.close()

    def breaches_of_files(self) -> list[str]:
        return [f"read {path}" for path in self.files if _works(functools.partial(_open_and_close, path))]

    def breaches_of_network(self) -> list[str]:
        return ["connected to a port of the host"] if _works(self._connect) else []

    def breaches_of_processes(self) -> list[str]:
        return ["could signal a process outside"] if _works(lambda: os.kill(self.pid, 0)) else []

    def _connect(self) -> None:
        socket.create_connection(self.address, timeout=1.0).close()


def _open_and_close(path: str) -> None:
    with open(path, "rb"):
        pass


def _works(action: Callable[[], object]) -> bool:
    try:
        action()
    except OSError:
        return False
    return True


def _breaches_of_system_calls() -> list[str]:
    tried: dict[str, Callable[[], object]] = {
        "started a process": _fork,
        "made a socket": socket.socket,
        "made a user namespace": lambda: kernel.unshare(kernel.NEW_USER),
        "mounted a file system": lambda: kernel.mount("none", "/", None, kernel.RECURSIVE | kernel.PRIVATE),
        "signalled another process": lambda: os.kill(os.getppid(), 0),
    }
    return [name for name, action in tried.items() if _works(action)]


def _fork() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)


def find(plan: isolation.Plan, without: set[str]) -> list[str]:
    """Fills the plan with the layers that hold on this host; `without` names layers to leave off.

    Returns files outside the box, for `whole` to try.
    """
    outside = Outside(plan.readable)
    tries: dict[str, Callable[[], list[str]]] = {
        "namespaces": lambda: _either_way(plan, outside),
        "landlock": lambda: in_scratch_process(lambda: _landlock(plan, outside)),
        "seccomp": lambda: in_scratch_process(_seccomp),
    }
    for name, attempt in tries.items():
        reason = "left off" if name in without else "needs Linux on x86_64 or aarch64" if not kernel.SUPPORTED else ""
        reason = reason or "; ".join(attempt())
        if reason:
            plan.missing[name] = reason
    outside.close()
    plan.namespaces = "namespaces" not in plan.missing
    plan.seccomp = "seccomp" not in plan.missing
    plan.landlock = 0 if "landlock" in plan.missing else landlock.abi()
    plan.limits = "limits" not in without
    plan.unprivileged = "identity" not in without
    if kernel.SUPPORTED and os.geteuid() == 0 and not plan.namespaces and plan.unprivileged:
        reasons = in_scratch_process(lambda: _identity(plan))
        if not reasons:
            plan.identity = namespaces.UID
        else:
            plan.missing["identity"] = "; ".join(reasons)
    return outside.files


def in_scratch_process(attempt: Callable[[], list[str]]) -> list[str]:
    """What `attempt` returns or the OSError it raises, from a forked process that ends afterwards."""
    readable, writable = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(readable)
            try:
                breaches = attempt()
            except OSError as error:
                breaches = [str(error)]
            os.write(writable, "\n".join(["done", *breaches]).encode())
        finally:
            os._exit(0)
    os.close(writable)
    with open(readable, "rb") as pipe:
        lines = pipe.read().decode().split("\n")
    os.waitpid(pid, 0)
    return lines[1:] if lines[0] == "done" else ["the probing process died"]


def _either_way(plan: isolation.Plan, outside: Outside) -> list[str]:
    """Namespaces as root, then as anyone: a container's root may lack the rights or the user ids for the first way."""
    first: list[str] = []
    for as_root in (True, False) if os.geteuid() == 0 else (False,):
        plan.as_root = as_root
        breaches = in_scratch_process(lambda: _namespaces(plan, outside))
        if not breaches:
            return []
        first = first or breaches
    return first


def _namespaces(plan: isolation.Plan, outside: Outside) -> list[str]:
    namespaces.leave(plan.as_root)

    def inside() -> list[str]:
        namespaces.enter(plan.readable, plan.as_root)
        namespaces.mount_scratch()
        wrote = [path for path in plan.readable if _works(functools.partial(os.mkdir, f"{path}/x"))]
        breaches = [f"wrote below {path}" for path in wrote] + outside.breaches_of_files()
        return breaches + outside.breaches_of_network() + outside.breaches_of_processes()

    return in_scratch_process(inside)


def _landlock(plan: isolation.Plan, outside: Outside) -> list[str]:
    abi = landlock.abi()
    if not abi:
        return ["the kernel has no Landlock"]
    ruleset = landlock.ruleset(plan.readable, [], abi)
    kernel.no_new_privileges()
    landlock.restrict(ruleset)
    breaches = outside.breaches_of_files()
    if abi >= 4:
        breaches += outside.breaches_of_network()
    if abi >= 6:
        breaches += outside.breaches_of_processes()
    return breaches


def _seccomp() -> list[str]:
    seccomp.SystemCallFilter(own_root=False).install(os.getpid())
    return _breaches_of_system_calls()


def _identity(plan: isolation.Plan) -> list[str]:
    namespaces.become(namespaces.UID)
    unreadable = [path for path in plan.readable if not os.access(path, os.R_OK | os.X_OK)]
    return [f"{path} cannot be read by another user" for path in unreadable]


def whole(box: isolation.Isolation, outside_files: list[str]) -> list[str]:
    """Breaches out of the full plan, tried in a forked child; empty for those layers that are missing anyway."""
    plan = box.plan

    def inside() -> list[str]:
        box.enter_child(0)
        breaches = []
        if plan.namespaces or plan.landlock:
            breaches += [f"read {path}" for path in outside_files if _works(functools.partial(_open_and_close, path))]
        if plan.seccomp:
            breaches += _breaches_of_system_calls()
        if plan.limits:
            soft = resource.getrlimit(resource.RLIMIT_AS)[0]
            if soft == resource.RLIM_INFINITY or _works(lambda: mmap.mmap(-1, soft)):
                breaches.append("got more memory than the limit")
        if not _works(lambda: open("probe", "w").close()):
            breaches.append("its scratch folder cannot be written")
        return breaches

    return in_scratch_process(inside)
