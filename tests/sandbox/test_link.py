"""The tool under kill -9: no orphan, no lost future, infra kept apart."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import config
import tools
from sandbox.parent.link import Link

ROOT = Path(__file__).resolve().parents[2]
GRACE_S = 3.0  # a second is promised; a crowded test machine gets more
SLEEP = "import time\ntime.sleep({})\nprint({})"


def _descendants(root: int) -> set[int]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            if stat[0] != "Z":
                children.setdefault(int(stat[1]), []).append(int(entry.name))
    todo, found = [root], set()
    while todo:
        found.add(pid := todo.pop())
        todo += children.get(pid, [])
    return found


def _alive(pids: set[int]) -> set[int]:
    return {pid for pid in pids if pid in _descendants(1) | _descendants(os.getpid())}


def _wait_for(condition, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return condition()


pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")


@pytest.fixture
def tool():
    made = tools.PythonTool(config.ToolConfig(preload=(), max_running=2))
    yield made
    made.close()


@pytest.mark.parametrize("victim", ["zygote_pid", "broker_pid"])
def test_a_killed_process_is_replaced_and_its_calls_run_once_more(tool, victim):
    stats = tool.stats()
    before = _descendants(stats["broker_pid"])
    futures = [tool.submit(SLEEP.format(0.2, number)) for number in range(6)]
    assert _wait_for(lambda: tool.stats()["running"] == 2, 5)
    os.kill(stats[victim], signal.SIGKILL)
    assert _wait_for(lambda: not _alive(before - _descendants(tool.stats()["broker_pid"])), GRACE_S)
    assert [future.result(timeout=20).text for future in futures] == [str(number) for number in range(6)]
    after = tool.stats()
    assert (after["retried"], after["broker_restarts"]) == ((2, 0) if victim == "zygote_pid" else (0, 1))


@pytest.mark.parametrize("victim", ["zygote_pid", "broker_pid"])
def test_a_call_that_loses_its_process_twice_is_infra_and_never_text(tool, victim):
    future = tool.submit(SLEEP.format(30, 1))
    seen = [0]
    for _ in range(2):
        assert _wait_for(lambda: (stats := tool.stats())["running"] == 1 and stats[victim] not in seen, 5)
        seen.append(tool.stats()[victim])
        os.kill(seen[-1], signal.SIGKILL)
    result = future.result(timeout=20)
    assert (result.status, result.text, result.stdout) == ("infra", "", "")
    assert tool("print(1)") == "1"
    assert tool.stats()["calls"]["infra"] == 1


def test_everything_dies_with_the_trainer():
    code = (
        "import config, tools, time\n"
        "tool = tools.PythonTool(config.ToolConfig(preload=(), max_running=2))\n"
        "futures = [tool.submit('while True: pass') for _ in range(4)]\n"
        "print(tool.stats()['broker_pid'], flush=True)\n"
        "time.sleep(60)\n"
    )
    command = [sys.executable, "-c", code]
    trainer = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    broker = int(trainer.stdout.readline())
    pids = _descendants(broker)
    assert len(pids) >= 5
    trainer.kill()
    trainer.wait()
    trainer.stdout.close()
    assert _wait_for(lambda: not _alive(pids), GRACE_S)


def test_close_leaves_no_process_no_descriptor_and_no_folder():
    descriptors = len(os.listdir("/proc/self/fd"))
    made = tools.PythonTool(config.ToolConfig(preload=(), max_running=2))
    pids = _descendants(made.stats()["broker_pid"])
    scratch = made._link._scratch.name
    made.close()
    assert _wait_for(lambda: not _alive(pids), GRACE_S)
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert not os.path.exists(scratch)


def test_a_broker_that_cannot_come_back_resolves_everything_as_infra(tool, monkeypatch):
    future = tool.submit(SLEEP.format(30, 1))
    monkeypatch.setattr(sys, "executable", "/bin/false")
    os.kill(tool.stats()["broker_pid"], signal.SIGKILL)
    assert future.result(timeout=20).status == "infra"
    assert tool.submit("print(1)").result(timeout=5).status == "infra"
    with pytest.raises(tools.SandboxError, match="failed twice"):
        tool("print(1)")


def test_a_broker_that_hangs_is_replaced(monkeypatch):
    monkeypatch.setattr("sandbox.parent.link.SILENCE_S", 0.2)
    made = tools.PythonTool(config.ToolConfig(preload=(), max_running=2, timeout_seconds=0.2))
    os.kill(made.stats()["broker_pid"], signal.SIGSTOP)
    assert made.submit("print(1)").result(timeout=20).text == "1"
    assert made.stats()["broker_restarts"] == 1
    made.close()


def test_a_worn_zygote_is_replaced_while_calls_go_on():
    settings = tools._broker_settings(config.ToolConfig(preload=(), max_running=2), ()) | {"recycle_calls": 20}
    link = Link(settings, tools.limits.ENVIRONMENT, tools._INFRA)
    header = {"op": "call", "seed": 0, "timeout_s": 5.0}
    futures = [link.ask(header, b"print(1)", lambda answer, _: answer["status"]) for _ in range(100)]
    assert [future.result(timeout=20) for future in futures] == ["ok"] * 100
    stats = link.ask({"op": "stats"}, b"", lambda answer, _: answer["stats"]).result(timeout=5)
    assert stats["zygotes_started"] >= 2 and stats["retried"] == 0
    link.close()
