"""The fork server: imports the preload list once, then forks a child for each order. It never sees a program.

Started by the broker with a stream socket (descriptor in argv). It says hello with one JSON line, then obeys
control.ORDER records and reports every dead child. It ends with its socket, and every child with it. Invariants: one
thread; no program text in its memory, since children inherit it; the only descriptors are 0-2, the socket and what an
order brings.
"""

from __future__ import annotations

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

from sandbox import child, control, limits


class Zygote:
    def __init__(self, sock: socket.socket, settings: limits.Settings):
        self._socket = sock
        self._settings = settings
        self._slots: dict[int, int] = {}  # pid -> slot
        self._pids: dict[int, int] = {}  # slot -> pid

    def serve(self) -> None:
        """Obeys orders until the broker's end closes."""
        signal.signal(signal.SIGCHLD, self._reap)
        fd_bytes = socket.CMSG_LEN(3 * array.array("i").itemsize)
        while True:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
            try:
                data, ancillary, _, _ = self._socket.recvmsg(control.ORDER.size, fd_bytes)
            except ConnectionResetError:
                return
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
            if len(data) < control.ORDER.size:
                return
            order, slot = control.ORDER.unpack(data)
            if order == control.FORK:
                fds = array.array("i", ancillary[0][2])
                self._fork(slot, (fds[0], fds[1], fds[2]))
                for fd in fds:
                    os.close(fd)
            elif slot in self._pids:
                os.kill(self._pids[slot], signal.SIGKILL)

    def _fork(self, slot: int, fds: tuple[int, int, int]) -> None:
        pid = os.fork()
        if pid:
            self._slots[pid] = slot
            self._pids[slot] = pid
            return
        status = 70
        try:
            child.live(fds, self._settings)
            status = 0
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
            slot = self._slots.pop(pid, None)
            if slot is not None:
                del self._pids[slot]
                record = control.DEATH.pack(slot, status, usage.ru_utime + usage.ru_stime, usage.ru_maxrss)
                with contextlib.suppress(BrokenPipeError):
                    self._socket.sendall(record)

    def kill_all(self) -> None:
        for pid in self._slots:
            os.kill(pid, signal.SIGKILL)


def main(fd: int, config: dict) -> None:
    """Runs a zygote on the socket `fd` with the broker's `config` (paths, preload, memory_mb, tasks)."""
    sock = socket.socket(fileno=fd)
    os.set_inheritable(fd, False)
    sys.path[:] = config["paths"]
    sys.argv, sys.orig_argv = [""], ["python"]
    try:
        for name in config["preload"]:
            __import__(name)
    except ImportError as error:
        _hello(sock, {"error": f"tool.preload: {error}"})
        return
    for name in [name for name in sys.modules if name.partition(".")[0] == "sandbox"]:
        del sys.modules[name]
    atexit._clear()
    settings = limits.Settings(_virtual_bytes() + (config["memory_mb"] << 20), config["tasks"])
    zygote = Zygote(sock, settings)
    gc.collect()
    gc.freeze()
    _hello(sock, {"pid": os.getpid()})
    zygote.serve()
    zygote.kill_all()


def _hello(sock: socket.socket, message: dict) -> None:
    sock.sendall(json.dumps(message).encode() + b"\n")


def _virtual_bytes() -> int:
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return 1 << 30  # no /proc (macOS): its interpreter and libraries fit well below
