"""The single-use process: takes its descriptors, shuts itself in, says ready, waits for one program, runs it, dies."""

from __future__ import annotations

import os
import resource
import signal
import time

from sandbox import control, limits, program

CONTROL_FD = 3


def live(fds: tuple[int, int, int], settings: limits.Settings) -> None:
    """Runs in the forked child. Returns when the outcome is written; the caller ends the process."""
    _take_descriptors(*fds)
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    limits.apply(settings)
    os.write(CONTROL_FD, control.READY)
    head = _read(control.PROGRAM.size)
    length, seed, timeout_s, show_last, filter_imports = control.PROGRAM.unpack(head)
    code = _read(length)
    cpu_limit = int(timeout_s) + 2 + int(time.process_time())
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_limit, cpu_limit))
    start = time.process_time()
    outcome = program.run(code, seed, bool(show_last), bool(filter_imports))
    used = time.process_time() - start
    record = control.pack_outcome(outcome.letter, outcome.shown, outcome.exit_code, used, outcome.error_type)
    os.write(CONTROL_FD, record)


def _take_descriptors(control_fd: int, out: int, err: int) -> None:
    """Leaves 0 (/dev/null), 1, 2 and 3 (control) open, nothing else. What recvmsg gives is >= 3."""
    os.dup2(out, 1)
    os.dup2(err, 2)
    if control_fd != CONTROL_FD:
        os.dup2(control_fd, CONTROL_FD)
    os.closerange(CONTROL_FD + 1, limits.ZYGOTE_FDS)


def _read(count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = os.read(CONTROL_FD, count - len(data))
        if not piece:
            os._exit(0)  # the broker gave this spare up
        data += piece
    return data
