"""Whatever happens to the console, no step is lost: the run goes on, saves and ends as it would have."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.launch import ROOT, metrics
from tests.support.ranks import SETTINGS

ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}
RUN = f"{sys.executable} main.py --config configs/tiny_cpu.json --set {' '.join(SETTINGS)} train.check=false"


def assert_whole(run_dir: Path) -> None:
    assert [row["step"] for row in metrics(run_dir)] == [1, 2, 3, 4]
    assert (run_dir / "checkpoints/step_4/state.json").exists()


SLOW = [pytest.param(console, marks=pytest.mark.slow) for console in (">&-", "> /dev/full", ">&- 2>&- <&-")]


@pytest.mark.parametrize("console", ["| head -1", "> /dev/full 2>&1", *SLOW])
def test_a_console_that_takes_no_more_costs_nothing(tmp_path, console):
    command = f"set -o pipefail; {RUN} --run-dir {tmp_path / 'run'} {console}"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0 and "Traceback" not in done.stderr
    assert_whole(tmp_path / "run")


def test_ctrl_c_that_ends_the_reader_too_saves_the_step(tmp_path):
    process = subprocess.Popen(
        ["bash", "-c", f"set -o pipefail; {RUN} train.steps=500 --run-dir {tmp_path} | tee {tmp_path}/log"], cwd=ROOT,
        env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    while not (tmp_path / "metrics.jsonl").exists():
        assert process.poll() is None
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)
    assert "Traceback" not in process.communicate(timeout=60)[1]
    wait_for(lambda: (tmp_path / f"checkpoints/step_{metrics(tmp_path)[-1]['step']}/state.json").exists())


@pytest.mark.slow
def test_a_terminal_that_hangs_up_costs_no_step(tmp_path):
    """The live table's thread and the last line write to a terminal that is gone; SIGHUP saves and ends."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*RUN.split(), "train.steps=500", "--run-dir", str(tmp_path)], cwd=ROOT, env=ENVIRONMENT, stdin=theirs,
        stdout=theirs, stderr=theirs, start_new_session=True,
    )  # fmt: skip
    os.close(theirs)
    wait_for(lambda: os.read(ours, 4096) and (tmp_path / "metrics.jsonl").exists())
    os.close(ours)
    process.send_signal(signal.SIGHUP)
    assert process.wait(timeout=60) == 0
    assert (tmp_path / f"checkpoints/step_{metrics(tmp_path)[-1]['step']}/state.json").exists()


def wait_for(condition, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)
