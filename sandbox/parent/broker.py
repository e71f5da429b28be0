"""The process between trainer and programs: queue, deadlines, output caps, statuses. It never looks into a program.

One thread and one selector. Invariants: every call that came in is answered exactly once, whatever dies; at most
`max_running` calls run at once, and a call's clock starts when its child gets it; a call is answered when its outcome
is known, before its child is dead. Output is read every few milliseconds, not at every write: a program that prints in
a loop costs the broker nothing extra.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import selectors
import socket
import sys
import time
from collections import deque
from typing import Any

from sandbox import control
from sandbox.layers import limits
from sandbox.parent import wire
from sandbox.parent.fork_server import Child, Outcome
from sandbox.parent.pool import MAX_FAILURES, Pool

DRAIN_S = (0.004, 0.02)  # pause between two looks at a running call's output: after output came, and at most
PARENT_CHECK_S = 0.5
DESCRIPTORS = 4096
DISK_CHECK_S = 0.05  # where the scratch folder is not a tmpfs with a size of its own
OBEY_S = 5.0  # a killed child is dead by then, or its zygote is lost
_KILLER: Outcome = ("crash", False, 0, 0.0, "it ended the tool's own process")
_INFRA: Outcome = ("infra", False, 0, 0.0, "Infra")


class PendingCall:
    """One call on its way: as it came from the trainer, and what the clock says."""

    def __init__(self, header: dict[str, Any], code: bytes, now: float):
        self.ident: int = header["id"]
        self.seed: int = header["seed"]
        self.timeout_s: float = header["timeout_s"]
        self.code = code
        self.attempts = 0
        self.submitted = now
        self.started = self.deadline = self.next_drain = self.next_disk_check = 0.0
        self.pause = DRAIN_S[0]


class Broker:
    """Serves one trainer over one socket until either side ends."""

    def __init__(self, sock: socket.socket, config: dict[str, Any]):
        self._socket = sock
        self._config = config
        self._reader = wire.FrameReader()
        self._outbox = bytearray()
        self._selector = selectors.DefaultSelector()
        self._selector.register(sock, selectors.EVENT_READ, (self._trainer, None))
        self._queue: deque[PendingCall] = deque()
        self._running: set[Child] = set()
        self._pool = Pool(self._selector, config, self._finished, self._lost)
        self._open = True
        self._retried = 0
        self._greeted = False

    def serve(self) -> None:
        parent = os.getppid()
        pause = 0.0
        while self._open:
            for key, _ in self._selector.select(pause):
                handler, argument = key.data
                handler(argument)
            now = time.monotonic()
            self._dispatch(now)
            pause = min(self._watch(now), self._pool.tend(bool(self._queue), now), PARENT_CHECK_S)
            self._greet()
            self._flush()
            if os.getppid() != parent:
                break
        self._pool.stop()
        if os.getppid() != parent:
            with contextlib.suppress(OSError):
                os.rmdir(self._config["scratch"])  # nobody else is left to do it

    def _greet(self) -> None:
        """Tells the trainer once that calls can be served; and when they cannot, why."""
        pool = self._pool
        if pool.failures and (not self._greeted or pool.failures >= MAX_FAILURES):
            self._send({"op": "failed", "error": pool.error})
            self._open = False
        elif not self._greeted and pool.current is not None and pool.spares():
            self._send({"op": "hello", "hello": pool.current.hello})
            self._greeted = True

    def _trainer(self, _: None) -> None:
        try:
            data = self._socket.recv(1 << 18)
        except BlockingIOError:
            return
        except ConnectionResetError:
            data = b""
        if not data:
            self._open = False
            return
        now = time.monotonic()
        for header, payload in self._reader.feed(data):
            if header["op"] == "call":
                self._queue.append(PendingCall(header, payload, now))
            else:
                self._send({"op": "answer", "id": header["id"], "stats": self._stats()})

    def _stats(self) -> dict[str, Any]:
        current = self._pool.current
        return {
            "queued": len(self._queue), "running": len(self._running), "spares": self._pool.spares(),
            "retried": self._retried, "zygotes_started": self._pool.started,
            "zygote_pid": (current.hello or {}).get("pid", 0) if current else 0,
        }  # fmt: skip

    def _dispatch(self, now: float) -> None:
        while self._queue and len(self._running) < self._config["max_running"]:
            child = self._pool.take()
            if child is None:
                return
            child.call = call = self._queue.popleft()
            call.started = now
            call.deadline = now + call.timeout_s
            call.next_drain = now + call.pause
            call.next_disk_check = now
            last, filtered = self._config["show_last_value"], self._config["import_filter"]
            head = control.PROGRAM.pack(len(call.code), call.seed, call.timeout_s, last, filtered)
            self._running.add(child)
            child.give(head + call.code)

    def _watch(self, now: float) -> float:
        """Reads output and ends what is over a limit; returns seconds until it has to look again."""
        pause = PARENT_CHECK_S
        for child in list(self._running):
            call = child.call
            if child.verdict:
                if now - child.killed_at > OBEY_S:
                    self._pool.lose(child.zygote, "it does not obey")
                continue
            if now >= call.next_drain:
                came = child.out.drain(limits.OUTPUT_BYTES) + child.err.drain(limits.OUTPUT_BYTES)
                call.pause = DRAIN_S[0] if came else min(2 * call.pause, DRAIN_S[1])
                call.next_drain = now + call.pause
            if child.out.total_bytes + child.err.total_bytes > limits.OUTPUT_BYTES:
                self._end(child, "output_limit", now)
            elif now >= call.deadline:
                self._end(child, "timeout", now)
            elif now >= call.next_disk_check:
                call.next_disk_check = now + DISK_CHECK_S
                if child.scratch() and limits.disk_bytes(child.scratch()) > limits.FILE_BYTES:
                    self._end(child, "disk_limit", now)
            pause = min(pause, call.next_drain - now, call.deadline - now)
        return max(pause, 0.0)

    def _end(self, child: Child, verdict: str, now: float) -> None:
        child.verdict = verdict
        child.killed_at = now
        child.zygote.kill(child)

    def _finished(self, child: Child) -> None:
        """A running call's outcome is known: answer it and let its child go."""
        self._running.discard(child)
        for stream in (child.out, child.err):
            stream.drain(limits.OUTPUT_BYTES)
        out, out_cut, out_tail = child.out.pieces()
        err, err_cut, err_tail = child.err.pieces()
        self._answer(child.call, child.outcome or _INFRA, [out_cut, err_cut], [out, out_tail, err, err_tail])
        self._pool.retire(child)

    def _lost(self, call: PendingCall, shielded: bool) -> None:
        """The fork server died under a call: once more, then it is the sandbox's failure.

        Where no layer keeps a program from killing the fork server, a second death is taken for the program's deed.
        """
        self._running = {child for child in self._running if child.call is not call}
        call.attempts += 1
        if call.attempts < 2:
            self._retried += 1
            self._queue.appendleft(call)
        else:
            self._answer(call, _INFRA if shielded else _KILLER, [0, 0], [b""] * 4)

    def _answer(self, call: PendingCall, outcome: Outcome, cut: list[int], pieces: list[bytes]) -> None:
        status, shown, code, cpu_s, error_type = outcome
        self._send(
            {
                "op": "answer",
                "id": call.ident,
                "status": status,
                "error_type": error_type,
                "code": code,
                "shown": shown,
                "timeout_s": call.timeout_s,
                "wall_s": time.monotonic() - call.started,
                "cpu_s": cpu_s,
                "queue_s": call.started - call.submitted,
                "cut": cut,
                "sizes": [len(piece) for piece in pieces],
            },
            b"".join(pieces),
        )

    def _send(self, header: dict[str, Any], payload: bytes = b"") -> None:
        self._outbox += wire.pack(header, payload)

    def _flush(self) -> None:
        if not self._outbox:
            return
        try:
            sent = self._socket.send(self._outbox)
        except BlockingIOError:
            sent = 0
        except (BrokenPipeError, ConnectionResetError):
            self._open = False
            return
        del self._outbox[:sent]
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._outbox else 0)
        if self._selector.get_key(self._socket).events != events:
            self._selector.modify(self._socket, events, (self._trainer, None))


def main(fd: int) -> None:
    """Runs a broker on the socket `fd`; its config is the program's argument, as JSON."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < DESCRIPTORS:  # three for each child
        resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS if hard < 0 else min(DESCRIPTORS, hard), hard))
    sock = socket.socket(fileno=fd)
    config = json.loads(sys.argv[1])
    config["zygote"]["scratch"] = config["scratch"]
    sock.setblocking(False)
    Broker(sock, config).serve()
