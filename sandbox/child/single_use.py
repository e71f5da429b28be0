"""The single-use process: takes its descriptors, shuts itself in, says ready, waits for one program, runs it, dies."""

from __future__ import annotations

import _signal
import contextlib
import os
import time

from sandbox import control
from sandbox.child import program
from sandbox.layers import limits
from sandbox.layers.isolation import Isolation

CONTROL_FD = 3


def live(fds: tuple[int, int, int], number: int, box: Isolation) -> None:
    """Runs in the forked child. Returns when the outcome is written; the caller ends the process."""
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
