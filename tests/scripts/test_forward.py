"""Signals to the script's own process reach every rank, and a rank's refusal ends the others soon."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.support.launch import ROOT, metrics
from tests.support.ranks import SETTINGS
from tests.support.shell import environment


def script(run_dir: Path, *settings: str, **how) -> subprocess.Popen:
    sets = [word for setting in (*SETTINGS, *settings) for word in ("--set", setting)]
    return subprocess.Popen(
        ["bash", "scripts/tiny_cpu.sh", "--run-dir", str(run_dir), *sets], cwd=ROOT, env=environment(NUM_GPUS="2"),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **how,
    )  # fmt: skip


def wait_for(condition, process: subprocess.Popen, seconds: float = 90) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end and process.poll() is None, process.communicate()
        time.sleep(0.05)


def of_run(run_dir: Path) -> list[str]:
    """Processes that were started for this run."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            found += [folder.name] if str(run_dir) in (folder / "cmdline").read_text() else []
        except OSError:
            continue
    return found


def saved(run_dir: Path) -> list[Path]:
    return list(run_dir.glob("checkpoints/step_*/state.json"))


def test_usr1_saves_and_goes_on_and_term_saves_and_ends(tmp_path):
    process = script(tmp_path, "train.steps=500", "train.save_every=0", "train.check=false")
    wait_for((tmp_path / "metrics.jsonl").exists, process)
    process.send_signal(signal.SIGUSR1)
    wait_for(lambda: saved(tmp_path), process)
    steps = len(metrics(tmp_path))
    wait_for(lambda: len(metrics(tmp_path)) > steps, process)
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert output.count("SIGTERM: the run ends when the step under way is finished and saved") >= 1
    assert (tmp_path / f"checkpoints/step_{metrics(tmp_path)[-1]['step']}/state.json").exists()
    assert not of_run(tmp_path)


@pytest.mark.slow
def test_a_killed_script_leaves_no_orphans(tmp_path):
    process = script(tmp_path, "train.steps=500", "train.check=false")
    wait_for((tmp_path / "metrics.jsonl").exists, process)
    process.kill()
    process.communicate()
    end = time.monotonic() + 60
    while of_run(tmp_path):
        assert time.monotonic() < end, of_run(tmp_path)
        time.sleep(0.1)
    assert saved(tmp_path)


def test_a_refusal_of_rank_0_ends_the_others_within_seconds(tmp_path):
    """A vocabulary beyond the model's fails the check, which rank 0 alone runs."""
    folder = tmp_path / "model"
    folder.mkdir()
    for path in (ROOT / "models/tiny_qwen3").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    config = json.loads((folder / "tokenizer.json").read_text())
    highest = max(token["id"] for token in config["added_tokens"])
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    for extra in range(size - highest + 8):
        config["added_tokens"].append(
            config["added_tokens"][-1] | {"id": highest + 1 + extra, "content": f"<|x{extra}|>"}
        )
    (folder / "tokenizer.json").write_text(json.dumps(config))
    process = script(tmp_path / "run", f"model.path={folder}", stdin=subprocess.DEVNULL)
    said = process.stderr.readline()
    while said and "error: check failed" not in said:
        said = process.stderr.readline()
    assert said
    started = time.monotonic()
    while ranks_of(process.pid):
        time.sleep(0.05)
    assert time.monotonic() - started < 5
    process.communicate(timeout=60)
    assert process.returncode == 1 and not (tmp_path / "run").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_a_run_that_starts_ends_it_at_once(tmp_path, number):
    process = script(tmp_path / "run")
    wait_for(lambda: len(ranks_of(process.pid)) == 2, process)
    time.sleep(1.0)  # in the imports of its libraries
    started = time.monotonic()
    process.send_signal(number)
    process.communicate(timeout=60)
    assert time.monotonic() - started < 5
    assert not (tmp_path / "run/metrics.jsonl").exists() and not of_run(tmp_path)


def ranks_of(process: int) -> list[int]:
    from scripts.forward import _ranks

    return _ranks(process)


@pytest.mark.slow
def test_nohup_keeps_a_hang_up_away(tmp_path):
    process = script(
        tmp_path, "train.steps=6", "train.check=false", preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)
    )
    wait_for((tmp_path / "metrics.jsonl").exists, process)
    os.kill(process.pid, signal.SIGHUP)
    process.communicate(timeout=90)
    assert process.returncode == 0 and len(metrics(tmp_path)) == 6
