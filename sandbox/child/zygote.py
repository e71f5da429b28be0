"""The fork server: imports the preload list once, then forks a single-use child for each order. Sees no program.

Started by the broker with a stream socket (descriptor in argv). It says hello with one JSON line, then obeys
control.ORDER records and reports every dead child. It ends with its socket, and every child with it. Invariants: one
thread; no program text in its memory, since children inherit it; few descriptors, all below limits.ZYGOTE_FDS.
"""

from __future__ import annotations

import _signal
import array
import atexit
import contextlib
import gc
import json
import os
import resource
import signal
import socket
import sys
import time
from typing import Any

from sandbox import control
from sandbox.child import program
from sandbox.layers import cgroup, isolation, kernel, limits, namespaces, probe

_fork = os.fork  # the name in os is taken from programs below
CONTROL_FD = 3  # a child's end of its control socket


class Zygote:
    def __init__(self, sock: socket.socket, box: isolation.Isolation):
        self._socket = sock
        self._box = box
        self._numbers: dict[int, int] = {}  # pid -> the child's number
        self._pids: dict[int, int] = {}  # the child's number -> pid

    def serve(self) -> None:
        """Obeys orders until the broker's end closes, then kills every child."""
        signal.signal(signal.SIGCHLD, self._reap)
        fd_bytes = socket.CMSG_LEN(3 * array.array("i").itemsize)
        while True:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
            try:
                data, ancillary, _, _ = self._socket.recvmsg(control.ORDER.size, fd_bytes)
            except ConnectionResetError:
                data = b""
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
            if len(data) < control.ORDER.size:
                break
            order, number = control.ORDER.unpack(data)
            if order == control.FORK:
                fds = array.array("i", ancillary[0][2])
                self._start(number, (fds[0], fds[1], fds[2]))
                for fd in fds:
                    os.close(fd)
            elif number in self._pids:
                os.kill(self._pids[number], signal.SIGKILL)
        for pid in self._numbers:
            os.kill(pid, signal.SIGKILL)

    def _start(self, number: int, fds: tuple[int, int, int]) -> None:
        try:
            pid = _fork()
        except OSError as error:  # no memory or no process left: the broker waits and tries again
            os.write(fds[2], f"fork: {error}".encode())
            self._socket.sendall(control.DEATH.pack(number, 1 << 8, 0.0, 0))
            return
        if pid:
            self._numbers[pid] = number
            self._pids[number] = pid
            return
        status = 70
        try:
            _live(fds, number, self._box)
            status = 0
        except Exception as error:  # a forked child must not go on as a zygote; the broker reads why it died
            os.write(2, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(status)

    def _reap(self, *_: object) -> None:
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            number = self._numbers.pop(pid, None)
            if number is not None:
                del self._pids[number]
                record = control.DEATH.pack(number, status, usage.ru_utime + usage.ru_stime, usage.ru_maxrss << 10)
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    self._socket.sendall(record)


def _live(fds: tuple[int, int, int], number: int, box: isolation.Isolation) -> None:
    """The child's life: it shuts itself in, says ready and runs one program. The caller ends the process."""
    _place(*fds)
    # A group of its own, so that signals to the group stay inside; not a session, since Linux shares the processor
    # between sessions, and all programs together shall weigh no more than the trainer.
    os.setpgid(0, 0)
    # The C functions below the signal module, whose enumerations touch (and so copy) 80 pages in every child.
    _signal.signal(_signal.SIGCHLD, _signal.SIG_DFL)
    _signal.pthread_sigmask(_signal.SIG_SETMASK, ())
    box.enter_child(number)
    os.closerange(CONTROL_FD + 1, limits.ZYGOTE_FDS)
    os.write(CONTROL_FD, control.READY)
    length, seed, timeout_s, show_last, filter_imports = control.PROGRAM.unpack(_read(control.PROGRAM.size))
    code = _read(length)
    start = time.process_time()
    limits.limit_processor_time(int(timeout_s + start) + 2)  # the broker's clock comes first; this holds without it
    outcome = program.run(code, seed, bool(show_last), bool(filter_imports))
    used = time.process_time() - start
    record = control.pack_outcome(outcome.letter, outcome.shown, outcome.exit_code, used, outcome.error_type)
    with contextlib.suppress(OSError):  # the program closed it: then its death is all that is known
        os.write(CONTROL_FD, record)


def _place(control_fd: int, out: int, err: int) -> None:
    """Puts stdout, stderr and control on 1, 2 and 3; 0 is /dev/null already. What recvmsg gave is 3 or above."""
    os.dup2(out, 1)
    os.dup2(err, 2)
    if control_fd != CONTROL_FD:
        os.dup2(control_fd, CONTROL_FD)


def _read(count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = os.read(CONTROL_FD, count - len(data))
        if not piece:
            os._exit(0)  # the broker gave this spare up
        data += piece
    return data


def main(fd: int, config: dict[str, Any]) -> None:
    """Runs a zygote on the socket `fd` with the broker's `config`."""
    sock = socket.socket(fileno=fd)
    os.set_inheritable(fd, False)
    try:
        hello, box = _prepare(config)
    except (ImportError, OSError, RuntimeError) as error:
        sock.sendall(json.dumps({"error": str(error)}).encode() + b"\n")
        return
    sock.sendall(json.dumps(hello).encode() + b"\n")
    Zygote(sock, box).serve()


def _prepare(config: dict[str, Any]) -> tuple[dict[str, Any], isolation.Isolation]:
    """Everything before the first order: layers, preload, warm caches. Raises ImportError, OSError, RuntimeError."""
    grouped = cgroup.join(config["cgroup"])
    plan = isolation.Plan(config["readable"], config["scratch"], config["memory_mb"] << 20, config["tasks"])
    outside = probe.find(plan, set(config["without"]))
    if "environment" in config["without"]:
        plan.missing["environment"] = "left off"
    box = isolation.Isolation(plan)
    if plan.namespaces:
        namespaces.leave(plan.as_root)
        _wait_for_child_if_parent()
    facts = _open_facts()
    pid = int(os.readlink("/proc/self")) if facts else os.getpid()
    box.enter_zygote()
    sys.path[:] = config["paths"]
    sys.argv, sys.orig_argv = [""], ["python"]
    for name in config["preload"]:
        try:
            __import__(name)
        except ImportError as error:
            raise ImportError(f"tool.preload={name!r}: {error}; install it or take it from the list") from error
    if facts and len(os.listdir(facts["task"])) != 1:
        raise RuntimeError("tool.preload started threads, which forked children would lack; take that module out")
    box.settle(_virtual_bytes(facts))
    for fact in facts.values():
        os.close(fact)
    breaches = probe.whole(box, outside)
    program.refuse_processes(threads=plan.limits and not plan.seccomp)
    _tidy()
    hello = {
        "pid": pid,
        "namespaces": plan.namespaces,
        "landlock": plan.landlock,
        "seccomp": plan.seccomp,
        "limits": plan.limits,
        "cgroup": grouped,
        "uid": os.getuid(),
        "missing": plan.missing,
        "breaches": breaches,
        "shielded": plan.namespaces or plan.seccomp or plan.landlock >= 6,  # programs cannot signal the zygote
    }
    return hello, box


def _wait_for_child_if_parent() -> None:
    """Forks into the new process namespace; the parent stays only to die with its child, and the child with it."""
    pid = _fork()
    if pid:
        kernel.die_with_parent()
        os.closerange(3, 64)
        _, status = os.waitpid(pid, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def _open_facts() -> dict[str, int]:
    """Descriptors of what has to be read after /proc is gone; empty where there is no /proc."""
    if not os.path.isdir("/proc/self/task"):
        return {}
    return {"statm": os.open("/proc/self/statm", os.O_RDONLY), "task": os.open("/proc/self/task", os.O_RDONLY)}


def _virtual_bytes(facts: dict[str, int]) -> int:
    if not facts:
        return 1 << 30  # macOS: the interpreter and its libraries fit well below
    return int(os.pread(facts["statm"], 100, 0).split()[0]) * resource.getpagesize()


def _tidy() -> None:
    """Leaves the heap as children shall find it: without our modules' names, caches warm, nothing to collect."""
    atexit._clear()
    program.prepare()
    for name in [name for name in sys.modules if name.partition(".")[0] == "sandbox"]:
        del sys.modules[name]
    gc.collect()
    gc.freeze()
