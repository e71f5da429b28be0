"""Starts a launcher (torchrun, `deepspeed`) and gives its ranks the signals that it would not: used by _launch.sh.

    python -m scripts.forward LAUNCHER [ARGUMENTS]

torchrun dies of a SIGUSR1 and kills its ranks 30 s after a SIGTERM. Here both reach the ranks, which save and go on or
end; the launcher then ends by itself, and with its status so does this. The launcher gets a session of its own, so
that Ctrl-C reaches each rank once, and a SIGTERM where this process is killed. Standard library only.

Left out: ranks on other machines. Send the signal to the script on each, or to one rank: all obey.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

POLL_S = 0.1
_PR_SET_PDEATHSIG = 1


def main(command: list[str]) -> int:
    asked: list[int] = []

    def on_signal(number: int, frame: FrameType | None) -> None:
        asked.append(number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # nohup's
            signal.signal(number, on_signal)
    libc = ctypes.CDLL(None)
    launcher = subprocess.Popen(
        command, start_new_session=True, preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))
    )
    while launcher.poll() is None:
        while asked and _forward(launcher.pid, asked[0]):
            asked.pop(0)
        time.sleep(POLL_S)
    return launcher.returncode if launcher.returncode >= 0 else 128 - launcher.returncode


def _forward(launcher: int, number: int) -> bool:
    """Whether the signal has been sent. A SIGUSR1 waits until every rank would catch it, and so not die of it."""
    ranks = _ranks(launcher)
    if number == signal.SIGUSR1 and not (ranks and all(_catches(rank, number) for rank in ranks)):
        return False
    for process in ranks or [launcher]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)
    return True


def _ranks(process: int) -> list[int]:
    """The nearest descendants that have RANK in their environment."""
    found = []
    with contextlib.suppress(OSError):
        for children in Path(f"/proc/{process}/task").glob("*/children"):
            for child in map(int, children.read_text().split()):
                found += [child] if _is_rank(child) else _ranks(child)
    return found


def _is_rank(process: int) -> bool:
    with contextlib.suppress(OSError):
        return b"\0RANK=" in b"\0" + Path(f"/proc/{process}/environ").read_bytes()
    return False


def _catches(process: int, number: int) -> bool:
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
        caught = next(int(line.split()[1], 16) for line in lines if line.startswith("SigCgt"))
        return bool(caught >> (number - 1) & 1)
    return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
