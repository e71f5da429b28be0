"""The broker's view of one zygote process and of its children's descriptors. Mechanism only; pool.py decides."""

from __future__ import annotations

import array
import contextlib
import itertools
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import time
from typing import Any

from sandbox import control
from sandbox.layers import cgroup
from sandbox.parent.streams import Stream

Outcome = tuple[str, bool, int, float, str]  # status, value shown, exit code or signal, CPU seconds, error type

_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
# Fork hooks (random, threading) would run in every child and are not needed: one thread, and seeds per call.
_BOOT = (
    "import os, sys; os.register_at_fork = lambda **hooks: None; sys.path.insert(0, {root!r}); "
    "from sandbox.child import zygote; zygote.main({fd}, {config!r})"
)
_GONE = (BrokenPipeError, ConnectionResetError)
_serial = itertools.count()


class Child:
    """A single-use child: starting, spare, running, dying, dead; and the broker's ends of its descriptors."""

    def __init__(self, number: int, zygote: ZygoteProcess, sock: socket.socket, out: int, err: int):
        self.number = number
        self.zygote = zygote
        self.control = sock
        self.out = Stream(out)
        self.err = Stream(err)
        self.state = "starting"
        self.call: Any = None
        self.outcome: Outcome | None = None
        self.verdict = ""  # why the broker ended it: timeout, output_limit, disk_limit
        self.killed_at = 0.0
        self.watched = False  # its control socket is in the selector

    def give(self, program: bytes) -> None:
        """Hands the program over; the child waits for it, so at most limits.CODE_BYTES go through at once."""
        self.control.setblocking(True)
        with contextlib.suppress(*_GONE):  # it died this moment, which the zygote reports
            self.control.sendall(program)
        self.control.setblocking(False)

    def receive(self) -> bytes:
        try:
            return self.control.recv(1024)
        except (BlockingIOError, ConnectionResetError):
            return b""

    def close(self) -> None:
        self.control.close()
        os.close(self.out.fd)
        os.close(self.err.fd)
        scratch = self.scratch()
        if scratch:
            shutil.rmtree(scratch, ignore_errors=True)

    def scratch(self) -> str:
        """Its folder on the host; empty where it has a tmpfs of its own."""
        hello = self.zygote.hello
        return "" if hello is None or hello.get("namespaces") else os.path.join(self.zygote.scratch, str(self.number))


class ZygoteProcess:
    """A running fork server: its process, its socket, its children."""

    def __init__(self, config: dict[str, Any]):
        self.socket, theirs = socket.socketpair()
        name = f"{os.getpid()}-{next(_serial)}"
        self.scratch = os.path.join(config["scratch"], name)
        os.mkdir(self.scratch)
        os.chmod(self.scratch, 0o1733 if os.geteuid() == 0 else 0o700)  # root: children have a user of their own
        grouped = "cgroup" not in config["without"]
        self._cgroup = cgroup.create(name, config["cgroup_bytes"], config["tasks"]) if grouped else []
        with theirs:
            settings = config | {"scratch": self.scratch, "cgroup": self._cgroup}
            boot = _BOOT.format(root=_ROOT, fd=theirs.fileno(), config=settings)
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-B", "-c", boot],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=(theirs.fileno(),),
            )  # fmt: skip
        self.children: dict[int, Child] = {}
        self.hello: dict[str, Any] | None = None
        self.served = self.starting = 0
        self.born = time.monotonic()
        self.last_fork = 0.0
        self.next_memory_check = self.first_resident_bytes = 0
        self._buffer = bytearray()

    def read(self) -> list[tuple[int, int, float, int]] | None:
        """The deaths it reports (child, wait status, CPU s, peak bytes); None when it is gone. Sets hello."""
        try:
            data = self.socket.recv(1 << 16)
        except ConnectionResetError:
            data = b""
        if not data:
            return None
        self._buffer += data
        if self.hello is None:
            line, newline, rest = self._buffer.partition(b"\n")
            if not newline:
                return []
            self.hello = json.loads(line)
            self._buffer = rest
        whole = len(self._buffer) // control.DEATH.size * control.DEATH.size
        deaths = list(control.DEATH.iter_unpack(self._buffer[:whole]))
        del self._buffer[:whole]
        return deaths

    def fork(self, number: int) -> Child:
        """Orders a child; it becomes a spare when it says ready."""
        mine, theirs = socket.socketpair()
        out, their_out = os.pipe()
        err, their_err = os.pipe()
        fds = array.array("i", [theirs.fileno(), their_out, their_err])
        child = self.children[number] = Child(number, self, mine, out, err)
        order = control.ORDER.pack(control.FORK, number)
        with contextlib.suppress(*_GONE):  # its end is read next, and takes the child along
            self.socket.sendmsg([order], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
        theirs.close()
        os.close(their_out)
        os.close(their_err)
        mine.setblocking(False)
        os.set_blocking(out, False)
        os.set_blocking(err, False)
        return child

    def kill(self, child: Child) -> None:
        with contextlib.suppress(*_GONE):
            self.socket.sendall(control.ORDER.pack(control.KILL, child.number))

    def resident_bytes(self) -> int:
        """Of the zygote itself; 0 where /proc cannot say."""
        try:
            with open(f"/proc/{(self.hello or {}).get('pid')}/statm", encoding="ascii") as file:
                return int(file.read().split()[1]) * resource.getpagesize()
        except OSError:
            return 0

    def stop(self, patience_s: float = 0.0) -> None:
        """Kills the process and with it every child; closes and removes what belongs to it."""
        self.socket.close()
        self.process.kill()
        self.process.wait()
        for child in self.children.values():
            child.close()
        self.children.clear()
        shutil.rmtree(self.scratch, ignore_errors=True)
        cgroup.remove(self._cgroup, patience_s)
