"""The process between trainer and user tools: queue, deadlines, deaths. It never runs a tool.

One thread and one selector. Invariants: every call that came in is answered exactly once, whatever dies; at most
`max_running` calls run at once, and a call's clock starts when its worker gets it; a call that ends its own process is
answered with how (error, timeout, out_of_memory), and so is the next call of a set whose process ended between two
calls, or a policy could drop its trajectory by a delayed exit; infra is a process that cannot be started. Calls of one
set with state run in order.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

from sandbox.parent import wire
from sandbox.workers.lanes import Call, Lane, Template, Worker

LOOK_S = 0.5
START_S = 120.0  # a file's imports take no longer
REPORT_S = 1.0  # a dead process is reported by then, or how it ended stays unknown
MAX_RESTARTS = 3
LOST = "The state of {name} is lost; the next call starts a new one."


class Broker:
    """Serves one trainer over one socket until either side ends."""

    def __init__(self, sock: socket.socket, config: dict[str, Any]):
        self._socket, self._config = sock, config
        self._frames, self._outbox = wire.FrameReader(), bytearray()
        self._selector = selectors.DefaultSelector()
        self._selector.register(sock, selectors.EVENT_READ, (self._trainer, None))
        self._open, self._greeted, self._restarts = True, False, 0
        self._templates = [self._template(settings) for settings in config["files"]]
        self._pools = [Lane(one, 0, config["max_running"], None) for one in self._templates]
        self._sessions: dict[int, tuple[bytes, dict[tuple[int, int], Lane]]] = {}
        self._waiting: dict[Lane, None] = {}  # lanes with calls, oldest first
        self._workers: dict[int, Worker] = {}
        self._numbers = self._running = 0
        self._begun = time.monotonic()

    def _template(self, settings: dict[str, Any]) -> Template:
        one = Template(settings)
        self._selector.register(one.socket, selectors.EVENT_READ, (self._report, one))
        return one

    def serve(self) -> None:
        parent, pause = os.getppid(), LOOK_S
        while self._open and os.getppid() == parent:
            for key, _ in self._selector.select(max(pause, 0.0)):
                handler, argument = key.data
                handler(argument)
            now = time.monotonic()
            self._dispatch(now)
            pause = self._watch(now)
            self._greet(now)
            if not self._flush():
                pause = min(pause, 0.002)
        for worker in list(self._workers.values()):
            worker.kill()
        for one in self._templates:
            one.stop()

    def _greet(self, now: float) -> None:
        if self._greeted:
            return
        error = next((one.error for one in self._templates if one.error), "")
        if not error and now - self._begun > START_S:
            error = f"a file's imports take longer than {START_S:g} s; import less at its top"
        if error:
            self._send({"op": "failed", "error": error})
            self._open = False
        elif all(one.ready for one in self._templates):
            self._send({"op": "hello", "hello": {"files": [one.hello for one in self._templates]}})
            self._greeted = True

    def _trainer(self, _: None) -> None:
        try:
            data = self._socket.recv(1 << 18)
        except ConnectionResetError:
            data = b""
        except BlockingIOError:
            return
        self._open = bool(data)
        now = time.monotonic()
        for header, payload in self._frames.feed(data):
            if header["op"] == "call":
                self._call(Call(header, payload, now))
                continue
            if header["op"] == "open":
                self._sessions[header["session"]] = (payload, {})
            elif header["op"] == "close":
                self._close(header["session"], now)
            self._send({"op": "answer", "id": header["id"], "workers": len(self._workers)})

    def _call(self, call: Call) -> None:
        number, index = call.header["file"], call.header["index"]
        lane = self._pools[number]
        if call.header["stateful"]:
            session = self._sessions.get(call.header["session"])
            if session is None:  # a broker before this one had it
                self._answer(call, "infra", "Infra", "")
                return
            problem, lanes = session
            lane = lanes.setdefault((number, index), Lane(self._templates[number], index, 1, problem))
        lane.queue.append(call)
        self._waiting[lane] = None

    def _close(self, session: int, now: float) -> None:
        _, lanes = self._sessions.pop(session, (b"", {}))
        for lane in lanes.values():
            self._waiting.pop(lane, None)
            for call in lane.queue:
                self._answer(call, "infra", "Infra", "")
            lane.queue.clear()
            for worker in list(lane.workers):
                if worker.call is None:
                    worker.outbox += wire.pack({"op": "close"})
                    worker.flush()
                    worker.ended_at = now + self._config["timeout_s"]  # killed then
                else:
                    if worker.call is not None:
                        self._done(worker, "infra", "Infra", "")
                    self._retire(worker)

    def _dispatch(self, now: float) -> None:
        for lane in list(self._waiting):
            while lane.queue and self._running < self._config["max_running"]:
                if lane.died_idle:
                    lane.died_idle = False
                    name = lane.template.settings["names"][lane.index]
                    words = f"Its process ended between two calls\n{LOST.format(name=name)}"
                    self._answer(lane.queue.popleft(), "error", "Ended", words)
                    continue
                worker = self._free_worker(lane)
                if worker is None:
                    break
                worker.call = call = lane.queue.popleft()
                call.started, call.deadline = now, now + call.header["timeout_s"]
                self._running += 1
                header = {key: call.header[key] for key in ("op", "index", "name", "seed")}
                worker.outbox += wire.pack(header, call.arguments)
                worker.flush()
            if not lane.queue:
                self._waiting.pop(lane, None)

    def _free_worker(self, lane: Lane) -> Worker | None:
        if lane.idle:
            return lane.idle.pop()
        if len(lane.workers) >= lane.limit or not lane.template.ready:
            return None
        self._numbers += 1
        worker = self._workers[self._numbers] = Worker(lane, self._numbers)
        lane.workers.add(worker)
        self._selector.register(worker.socket, selectors.EVENT_READ, (self._read, worker))
        return worker

    def _read(self, worker: Worker) -> None:
        """An answer of a worker, or its end."""
        if worker.number not in self._workers:  # retired by another event of this round
            return
        try:
            data = worker.socket.recv(1 << 18)
            frames = list(worker.frames.feed(data))
        except BlockingIOError:
            return
        except (ConnectionResetError, wire.WireError):
            data, frames = b"", []
        if not data:
            self._selector.unregister(worker.socket)
            worker.ended_at = time.monotonic() + (REPORT_S if worker.call else 0.0)
            return
        for header, text in frames:
            if worker.call is None or header.get("op") != "answer":
                continue
            lost = header["lost"]
            note = LOST.format(name=self._set_name(worker)) if lost and worker.lane.stateful else ""
            shown = text.decode("utf-8", "replace") + (f"\n{note}" if note else "")
            self._done(worker, header["status"], header["error_type"], shown, header["cpu_s"], header["truncated"])
            if lost:
                self._retire(worker)
            else:
                worker.lane.idle.append(worker)

    def _set_name(self, worker: Worker) -> str:
        return worker.template.settings["names"][worker.lane.index]

    def _report(self, template: Template) -> None:
        """What a template says of its workers; one that is gone is started again."""
        reports = template.read()
        if reports is None:
            self._selector.unregister(template.socket)
            self._replace(template)
            return
        if template.ready:
            self._restarts = 0
        for report in reports:
            worker = self._workers.get(report["number"])
            if report["op"] == "forked":
                if worker is None:  # retired before it began: its socket is closed, so it ends by itself
                    continue
                worker.pid = report["pid"]
                if worker.pid < 0:
                    self._ended(worker, None)
            elif worker is not None:
                worker.pid = 0
                if worker.call is not None and not worker.ended_at:
                    self._read(worker)  # what it said last
                self._ended(worker, report["code"])

    def _replace(self, template: Template) -> None:
        self._restarts += 1
        if not self._greeted or self._restarts > MAX_RESTARTS:
            if not template.error:
                self._send({"op": "failed", "error": f"{template.settings['path']}: its process ended; fix the file"})
                self._open = False
            return
        template.process.wait()
        template.socket.close()
        for worker in [one for one in self._workers.values() if one.template is template and not one.pid]:
            if worker.call is not None:  # its process was never forked: the next template does it
                self._running -= 1
                worker.lane.queue.appendleft(worker.call)
                self._waiting[worker.lane] = worker.call = None
            self._retire(worker)
        fresh = self._template(template.settings | {"again": True})
        position = self._templates.index(template)
        self._templates[position] = fresh
        held = [lane for _, lanes in self._sessions.values() for lane in lanes.values()]
        for lane in [self._pools[position], *held]:
            if lane.template is template:
                lane.template = fresh

    def _ended(self, worker: Worker, code: int | None) -> None:
        """A worker's process is over, or could not be started (None)."""
        if worker.call is not None:
            if code is None:
                self._done(worker, "infra", "Infra", "")
            else:
                name = signal.Signals(-code).name if code < 0 and -code in set(signal.Signals) else ""
                how = f"Crashed: signal {name or -code}" if code < 0 else f"Exited with status {code}"
                how = "Ended its connection to the trainer" if code == UNKNOWN else how
                kind = name or ("Crash" if code < 0 or code == UNKNOWN else "SystemExit")
                self._done(worker, "error", kind, self._noted(worker, how))
        elif worker.lane.stateful and worker in worker.lane.idle:
            worker.lane.died_idle = True
        self._retire(worker)

    def _noted(self, worker: Worker, words: str) -> str:
        return f"{words}\n{LOST.format(name=self._set_name(worker))}" if worker.lane.stateful else words

    def _watch(self, now: float) -> float:
        """Ends calls over their time and processes that are due; seconds until it has to look again."""
        pause = LOOK_S
        for worker in list(self._workers.values()):
            if worker.outbox and not worker.flush():
                pause = min(pause, 0.002)
            due = worker.ended_at or (worker.call.deadline if worker.call else now + LOOK_S)
            pause = min(pause, max(due - now, 0.0))
            if now >= due:
                if worker.ended_at:
                    self._ended(worker, UNKNOWN)
                elif worker.call:
                    self._overdue(worker, worker.call)
        return pause

    def _overdue(self, worker: Worker, call: Call) -> None:
        if worker.pid:
            words = f"TimeoutError: the tool ran longer than {call.header['timeout_s']:g} s and was stopped"
            self._done(worker, "timeout", "Timeout", self._noted(worker, words))
        else:  # never began
            self._done(worker, "infra", "Infra", "")
        self._retire(worker)

    def _retire(self, worker: Worker) -> None:
        if self._workers.pop(worker.number, None) is None:
            return
        worker.kill()
        if worker.socket in self._selector.get_map():
            self._selector.unregister(worker.socket)
        worker.socket.close()
        worker.lane.workers.discard(worker)
        if worker in worker.lane.idle:
            worker.lane.idle.remove(worker)

    def _done(
        self, worker: Worker, status: str, kind: str, text: str, cpu_s: float = 0.0, truncated: bool = False
    ) -> None:
        assert worker.call is not None
        self._running -= 1
        call, worker.call = worker.call, None
        self._answer(call, status, kind, text, cpu_s, truncated)
        if worker.lane.queue:
            self._waiting[worker.lane] = None

    def _answer(
        self, call: Call, status: str, kind: str, text: str, cpu_s: float = 0.0, truncated: bool = False
    ) -> None:
        now = time.monotonic()
        begun = call.started or now
        self._send(
            {"op": "answer", "id": call.header["id"], "status": status, "error_type": kind, "truncated": truncated,
             "cpu_s": cpu_s, "wall_s": now - begun, "queue_s": begun - call.submitted},
            text.encode("utf-8", "backslashreplace"),
        )  # fmt: skip

    def _send(self, header: dict[str, Any], payload: bytes = b"") -> None:
        self._outbox += wire.pack(header, payload)

    def _flush(self) -> bool:
        """Sends what the trainer's socket takes; True where nothing is left."""
        sending: Callable[[bytearray], int] = self._socket.send
        try:
            while self._outbox:
                del self._outbox[: sending(self._outbox)]
        except BlockingIOError:
            return False
        except (BrokenPipeError, ConnectionResetError):
            self._open = False
        return True


UNKNOWN = 1 << 20  # no exit status has this value


def main(fd: int) -> None:
    """Runs a broker on the socket `fd`; its config is the program's argument, as JSON."""
    sock = socket.socket(fileno=fd)
    sock.setblocking(False)
    Broker(sock, json.loads(sys.argv[1])).serve()
