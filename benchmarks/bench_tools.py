"""What the Python tool costs, on this host.

    python benchmarks/bench_tools.py                 latency, bursts, calls per second, CPU per call, delay
    python benchmarks/bench_tools.py --soak 20000    5 % hostile programs and random kills; leaks show
    python benchmarks/bench_tools.py --user 2000     a user's function, and a class with state

As an ordinary user: python tests/support/sandbox_user.py $(which python) benchmarks/bench_tools.py
CPU per call is user and system time of trainer, broker and fork server with its dead children, from /proc.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import resource
import signal
import statistics
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import config
import tools

TICKS = os.sysconf("SC_CLK_TCK")
TINY = "print(47*83+29)"
LIBRARIES = "import numpy, sympy; print(42)"
HOSTILE = [
    "while True: pass",
    "x = []\nwhile True: x.append('a' * 10**6)",
    "while True: print('x' * 1000)",
    "import ctypes; ctypes.string_at(0)",
    "import os; os.closerange(0, 64)\nwhile True: pass",
    "import threading, time\nfor _ in range(40): threading.Thread(target=time.sleep, args=(60,)).start()",
    "import os; os._exit(7)",
    "with open('f', 'wb') as f:\n    for _ in range(99): f.write(bytes(1 << 20))",
]


def _cpu_ms(pid: int) -> float:
    """User and system time of a process and of its dead children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return sum(map(int, fields[11:15])) * 1000 / TICKS


def _own_cpu_ms() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return (usage.ru_utime + usage.ru_stime) * 1000


def _row(name: str, text: str) -> None:
    print(f"  {name:<34} {text}", flush=True)


def _percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def _single(tool: tools.PythonTool, code: str, calls: int = 200) -> None:
    spent = []
    for _ in range(calls):
        time.sleep(0.005)
        start = time.perf_counter()
        assert tool.submit(code).result().status == "ok"
        spent.append((time.perf_counter() - start) * 1000)
    _row("one call at a time, ms", f"median {statistics.median(spent):.2f}   p95 {_percentile(spent, 0.95):.2f}")


def _burst(tool: tools.PythonTool, code: str, size: int, rounds: int = 20) -> None:
    spent = []
    for _ in range(rounds):
        time.sleep(0.5)
        start = time.perf_counter()
        for future in [tool.submit(code) for _ in range(size)]:
            assert future.result().status == "ok"
        spent.append((time.perf_counter() - start) * 1000)
    _row(f"burst of {size}, ms to the last", f"median {statistics.median(spent):.1f}   worst {max(spent):.1f}")


def _sustained(tool: tools.PythonTool, code: str, calls: int) -> None:
    stats = tool.stats()
    pids = [stats["broker_pid"], stats["zygote_pid"]]
    before, own, start = [_cpu_ms(pid) for pid in pids], _own_cpu_ms(), time.perf_counter()
    futures = [tool.submit(code) for _ in range(16)]
    for number in range(calls):
        assert futures[number].result().status == "ok"
        if number + 16 < calls:
            futures.append(tool.submit(code))
    seconds = time.perf_counter() - start
    time.sleep(1.0)  # the last children are dead and their spares are back
    broker, zygote = (_cpu_ms(pid) - was for pid, was in zip(pids, before, strict=True))
    own = _own_cpu_ms() - own
    _row("16 under way, calls/s", f"{calls / seconds:.0f}")
    parts = f"trainer {own / calls:.3f}   broker {broker / calls:.3f}   fork server and children {zygote / calls:.2f}"
    _row("CPU per call, ms", f"total {(own + broker + zygote) / calls:.2f}   ({parts})")


def _lateness(tool: tools.PythonTool | None, seconds: float = 3.0) -> tuple[float, float]:
    """(99.9th percentile, worst) lateness in ms of a thread that ticks every 5 ms, beside 300 calls or none."""
    late: list[float] = []
    end = time.perf_counter() + seconds

    def tick() -> None:
        due = time.perf_counter()
        while due < end:
            due += 0.005
            time.sleep(max(0.0, due - time.perf_counter()))
            late.append((time.perf_counter() - due) * 1000)
            due = max(due, time.perf_counter() - 0.005)

    ticker = threading.Thread(target=tick)
    ticker.start()
    if tool is not None:
        for future in [tool.submit(TINY) for _ in range(300)]:
            future.result()
    ticker.join()
    return _percentile(late, 0.999), max(late)


def measure(preload: tuple[str, ...], code: str) -> None:
    start = time.perf_counter()
    tool = tools.PythonTool(config.ToolConfig(preload=preload, import_filter="on"))
    print(f"\npreload {list(preload)}, program {code!r}, started in {time.perf_counter() - start:.2f} s")
    _row("report", tool.report)
    tool(code)
    time.sleep(1.0)
    _single(tool, code)
    _burst(tool, code, 16)
    _burst(tool, code, 190, 5)
    _sustained(tool, code, 600)
    alone, beside = _lateness(None), _lateness(tool)
    _row("5 ms ticker, late by ms", f"alone p99.9 {alone[0]:.2f} worst {alone[1]:.2f}   "
         f"beside 300 calls p99.9 {beside[0]:.2f} worst {beside[1]:.2f}")  # fmt: skip
    tool.close()


def user(calls: int) -> None:
    """A function and a class of tests/support/user_tools.py: latency, calls a second, the trainer's CPU."""
    beside = Path(__file__).resolve().parent.parent / "tests/support"
    made = tools.UserTools(["user_tools.py:search", "user_tools.py:Notebook"], config.ToolConfig(), beside)
    for name, arguments in (("search", {"query": "a"}), ("run", {"code": "x = 1"})):
        sessions = [made.open({}) for _ in range(16)]
        for one in sessions:
            one.call(name, arguments, 0).result()
        spent = []
        for number in range(200):
            start = time.perf_counter()
            assert sessions[number % 16].call(name, arguments, 0).result().status == "ok"
            spent.append((time.perf_counter() - start) * 1000)
        own, start = _own_cpu_ms(), time.perf_counter()
        futures = [sessions[number % 16].call(name, arguments, 0) for number in range(calls)]
        assert all(future.result().status == "ok" for future in futures)
        seconds = time.perf_counter() - start
        median, late = statistics.median(spent), _percentile(spent, 0.95)
        _row(f"{name}: one call at a time, ms", f"median {median:.2f}   p95 {late:.2f}")
        _row(f"{name}: calls/s", f"{calls / seconds:.0f}   trainer CPU a call {(_own_cpu_ms() - own) / calls:.3f} ms")
        for one in sessions:
            one.close()
    made.close()


def _session_size(leader: int) -> int:
    """Processes of a session: the broker leads one, and everything under it stays there."""
    size = 0
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            size += entry.name.isdigit() and os.getsid(int(entry.name)) == leader
    return size


def _counts(tool: tools.PythonTool) -> dict[str, int]:
    stats = tool.stats()
    kib = {}
    for name, pid in (("trainer", os.getpid()), ("broker", stats["broker_pid"]), ("zygote", stats["zygote_pid"])):
        status = Path(f"/proc/{pid}/status").read_text() if Path(f"/proc/{pid}/status").exists() else "VmRSS: 0"
        kib[f"{name}_kib"] = int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS")))
    return {
        "processes": _session_size(stats["broker_pid"]),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "broker_descriptors": len(os.listdir(f"/proc/{stats['broker_pid']}/fd")),
        "mounts": len(Path("/proc/mounts").read_text().splitlines()),
        "scratch": sum(
            path.name.startswith("python-tool-") for path in Path(os.environ.get("TMPDIR", "/tmp")).iterdir()
        ),
        "groups": len(list(Path("/sys/fs/cgroup").glob("*/python-tool-*"))),
    } | kib


def soak(calls: int) -> None:
    chance = random.Random(0)
    tool = tools.PythonTool(config.ToolConfig(preload=(), import_filter="off", timeout_seconds=0.5, max_running=2))
    print(tool.report)
    statuses: dict[str, int] = {}
    done, start = 0, time.time()
    while done < calls:
        size = min(500, calls - done)
        codes = [chance.choice(HOSTILE) if chance.random() < 0.05 else f"print({i})" for i in range(size)]
        futures = [tool.submit(code) for code in codes]
        if chance.random() < 0.3:
            time.sleep(chance.random() * 0.5)
            victim = tool.stats()[chance.choice(["zygote_pid", "broker_pid"])]
            if victim:
                os.kill(victim, signal.SIGKILL)
        for i, (code, future) in enumerate(zip(codes, futures, strict=True)):
            result = future.result(timeout=120)
            statuses[result.status] = statuses.get(result.status, 0) + 1
            if code not in HOSTILE and result.status != "infra":
                assert (result.status, result.text) == ("ok", str(i)), result
        done += size
        if done % 2000 == 0 or done == calls:
            time.sleep(1.0)
            print(f"{done:>6} calls {time.time() - start:6.0f} s  {_counts(tool)}", flush=True)
    print(statuses, {key: value for key, value in tool.stats().items() if key != "calls"})
    tool.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--soak", type=int, default=0, metavar="CALLS")
    parser.add_argument("--user", type=int, default=0, metavar="CALLS")
    arguments = parser.parse_args()
    if arguments.user:
        user(arguments.user)
        sys.exit()
    if arguments.soak:
        soak(arguments.soak)
    else:
        print(f"{os.cpu_count()} cores, uid {os.getuid()}, load {os.getloadavg()[0]:.1f}")
        measure((), TINY)
        measure(("numpy", "sympy"), LIBRARIES)
