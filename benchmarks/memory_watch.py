"""Memory in use during a run: of this process's GPU, measured from a second process, and of the host."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

# Holds all but `cap` bytes of the device and watches what is free until its input ends; prints the maximum in use.
HOLDER = """
import sys, threading, torch
torch.cuda.set_device(int(sys.argv[2]))
free, total = torch.cuda.mem_get_info()
held = torch.empty(max(0, free - int(float(sys.argv[1]) * 1e9)), dtype=torch.int8, device="cuda")
least = start = torch.cuda.mem_get_info()[0]
print(start, flush=True)
over = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
while not over.wait(0.02):
    least = min(least, torch.cuda.mem_get_info()[0])
print(start - least, flush=True)
"""


class Cap:
    """Leaves `gigabytes` of this rank's GPU free, held by a second process; its own context counts as held."""

    def __init__(self, gigabytes: float):
        """Exits where there is no such GPU, or it has less."""
        device = os.environ.get("LOCAL_RANK", "0")
        self._holder = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(gigabytes), device], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        assert self._holder.stdout
        free = self._holder.stdout.readline()
        if not free:
            sys.exit(
                f"error: --cap={gigabytes:g}: GPU {device} is missing or too small; leave --cap out without a GPU"
            )
        self.free_gb = int(free) / 1e9

    def used_gb(self) -> float:
        """Maximum in use beside the memory held, context and captured graphs included. Releases that memory."""
        return int(self._holder.communicate()[0]) / 1e9


class HostWatch:
    """Maximum host memory in use while it runs: of the whole machine since its start, and of this process."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._start = self._least = _available()
        self._most = _resident()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.wait(0.1):
            self._least = min(self._least, _available())
            self._most = max(self._most, _resident())

    def begin(self) -> float:
        """GB resident now. Restarts `most`."""
        self._most = _resident()
        return self._most / 1e9

    @property
    def most(self) -> float:
        """Maximum of GB resident since `begin`, or since the start."""
        return self._most / 1e9

    def stop(self) -> dict[str, float]:
        self._over.set()
        self._thread.join()
        return {"host_used_gb": (self._start - self._least) / 1e9}


def _resident() -> int:
    """Bytes of this process's own; pages of mapped files do not count."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) * 1024


def _available() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]) * 1024
