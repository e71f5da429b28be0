"""Killed anywhere, a resumed run equals the uninterrupted one: `pytest -m slow tests/run/test_faults.py`."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.support.faults import POINTS
from tests.support.launch import ROOT, metrics, numbers, trajectories, weights
from tests.support.ranks import SETTINGS as RANK_SETTINGS
from tests.support.ranks import launch

ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}
SETTINGS = [word for setting in RANK_SETTINGS for word in ("--set", setting)]


def arguments(run_dir: Path) -> list[str]:
    return ["--config", "configs/tiny_cpu.json", "--run-dir", str(run_dir), *SETTINGS]


def faulty(run_dir: Path, ranks: int, point: str, step: int, rank: int = 0) -> float:
    """Starts a run that dies; returns the seconds until every process was gone."""
    launcher = [sys.executable]
    if ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    started = time.monotonic()
    done = subprocess.run(
        [*launcher, "tests/support/faults.py", point, str(step), str(rank), *arguments(run_dir)],
        cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=180,
    )  # fmt: skip
    assert done.returncode != 0 and "killed at " in done.stderr, done.stderr[-2000:]
    return time.monotonic() - started


def resume(run_dir: Path, ranks: int) -> None:
    extra = ["--set", "train.save_every=1"]
    launch(run_dir, ranks, *extra, *(["--resume"] if (run_dir / "checkpoints/latest").exists() else []))


def assert_equal_runs(got: Path, expected: Path) -> None:
    assert numbers(got) == numbers(expected)
    for step in range(1, 5):
        assert trajectories(got, step) == trajectories(expected, step)
    for name, value in weights(expected / "checkpoints/step_4").items():
        assert torch.equal(weights(got / "checkpoints/step_4")[name], value), name


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    folder = tmp_path_factory.mktemp("straight")
    for ranks in (1, 2):
        launch(folder / str(ranks), ranks)
    return folder


MATRIX = [(point, ranks) for ranks in (1, 2) for point in POINTS]


@pytest.mark.slow
@pytest.mark.parametrize(("point", "ranks"), MATRIX, ids=lambda value: str(value))
def test_a_killed_run_resumes_to_the_uninterrupted_one(straight, tmp_path, point, ranks):
    assert faulty(tmp_path / "run", ranks, point, 3) < 60 + 40  # dead within a minute of start-up and three steps
    resume(tmp_path / "run", ranks)
    assert_equal_runs(tmp_path / "run", straight / str(ranks))


@pytest.mark.slow
def test_a_dead_rank_ends_the_others_within_a_minute(tmp_path):
    assert faulty(tmp_path / "run", 2, "backward", 2, rank=1) < 60 + 40


def test_term_finishes_the_step_saves_and_ends_with_status_zero(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "main.py", *arguments(tmp_path), "--set", "train.steps=500"], cwd=ROOT, env=ENVIRONMENT,
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    while not (tmp_path / "metrics.jsonl").exists():
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "SIGTERM" in output
    done = metrics(tmp_path)[-1]["step"]
    assert (tmp_path / f"checkpoints/step_{done}/state.json").exists()
    assert done < 500


@pytest.mark.slow  # tests/run/test_files.py and tests/run/test_checkpoint.py meet full disks in less time
def test_a_full_disk_ends_the_run_with_one_line_and_keeps_the_last_good_checkpoint(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system takes root")
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=11m", "none", str(disk)], capture_output=True).returncode:
        pytest.skip("this host does not let root mount a tmpfs")
    try:
        done = subprocess.run(
            [sys.executable, "main.py", *arguments(disk / "run")], cwd=ROOT, env=ENVIRONMENT, capture_output=True,
            text=True, timeout=120,
        )  # fmt: skip
        assert done.returncode == 2, done.stderr[-2000:]
        assert done.stderr.count("\n") == 1
        assert "could not be written" in done.stderr and "step_1 is the last complete one" in done.stderr
        shutil.copytree(disk / "run", tmp_path / "moved")
    finally:
        subprocess.run(["umount", str(disk)], check=True)
    shutil.rmtree(tmp_path / "moved/checkpoints/step_2.partial", ignore_errors=True)
    resume(tmp_path / "moved", 1)
    assert [row["step"] for row in metrics(tmp_path / "moved")] == [1, 2, 3, 4]
