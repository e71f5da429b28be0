"""Signals are obeyed between two steps, by every rank alike."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

import trainer
from run.checkpoint import CheckpointStore
from run.signals import Interruption, Request
from startup import building, check, run_folder
from tests.support.launch import ROOT, metrics, run


def alone(item):
    return [item]


def send(number: int) -> None:
    os.kill(os.getpid(), number)


def test_usr1_asks_for_a_checkpoint_once():
    with Interruption() as interruption:
        assert interruption.agreed(alone) is Request.NONE
        send(signal.SIGUSR1)
        assert interruption.agreed(alone) is Request.SAVE
        assert interruption.agreed(alone) is Request.NONE


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_term_and_ctrl_c_ask_for_an_end_and_are_not_weakened_by_usr1(number):
    with Interruption() as interruption:
        send(number)
        send(signal.SIGUSR1)
        assert interruption.agreed(alone) is Request.STOP


def test_all_ranks_obey_what_any_rank_saw():
    with Interruption() as interruption:
        assert interruption.agreed(lambda item: [item, Request.STOP, Request.NONE]) is Request.STOP


def test_the_time_limit_ends_the_run():
    with Interruption(max_minutes=1e-9) as interruption:
        time.sleep(0.001)
        assert interruption.agreed(alone) is Request.STOP


def test_asking_for_an_end_leaves_the_request_where_it_is():
    with Interruption() as interruption:
        send(signal.SIGUSR1)
        assert not interruption.ends(alone)
        assert interruption.ends(lambda item: [item, Request.STOP])
        assert interruption.agreed(alone) is Request.SAVE
        send(signal.SIGTERM)
        assert interruption.ends(alone) and interruption.agreed(alone) is Request.STOP


@pytest.mark.parametrize(
    ("owner", "name", "number"),
    [
        (run_folder, "check_run_dir", signal.SIGUSR1),
        (building, "build_policy", signal.SIGTERM),
        (trainer.Trainer, "__init__", signal.SIGINT),
    ],
)
def test_a_signal_before_the_first_step_is_obeyed(tmp_path, monkeypatch, capfd, owner, name, number):
    monkeypatch.chdir(ROOT)
    inner = getattr(owner, name)

    def signalled(*words, **named):
        send(number)
        return inner(*words, **named)

    monkeypatch.setattr(owner, name, signalled)
    assert run(tmp_path, "train.steps=2", "train.save_every=0") == 0
    if number is signal.SIGUSR1:  # saved after the step that comes next, and on it goes
        assert "step 1 is being saved beside the next one" in capfd.readouterr().out
        assert [row["step"] for row in metrics(tmp_path)] == [1, 2]
        assert (tmp_path / "checkpoints/step_1/state.json").exists()
    else:
        assert not (tmp_path / "metrics.jsonl").exists() and not (tmp_path / "checkpoints").exists()
        said = capfd.readouterr().out
        assert number.name in said and "ended before the first step" in said


def test_where_a_run_was_ended_and_what_goes_on_is_said(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(ROOT)
    inner = trainer.Trainer.train_step

    def signalled(*words):
        send(signal.SIGTERM)
        return inner(*words)

    monkeypatch.setattr(trainer.Trainer, "train_step", signalled)
    assert run(tmp_path, "train.check=false") == 0
    assert (
        f"ended after step 1 of 4; --resume goes on from {tmp_path / 'checkpoints/step_1'}" in capfd.readouterr().out
    )


def test_who_was_asked_to_end_meanwhile_is_not_checked_first(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(ROOT)
    inner = building.build_policy

    def signalled(*words, **named):
        send(signal.SIGTERM)
        return inner(*words, **named)

    monkeypatch.setattr(building, "build_policy", signalled)
    monkeypatch.setattr(check, "check", lambda parts: pytest.fail("a check of what will not be trained"))
    assert run(tmp_path, "train.steps=2", "train.check=true") == 0
    assert "ended before the first step" in capfd.readouterr().out


def test_the_handlers_of_before_are_back_afterwards():
    before = signal.getsignal(signal.SIGTERM)
    with Interruption():
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_second_term_ends_the_process_at_once():
    code = (
        "import os, signal\nfrom run.signals import Interruption\n"
        "with Interruption():\n    os.kill(os.getpid(), signal.SIGTERM)\n    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    print('still here')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == -signal.SIGTERM
    assert "still here" not in done.stdout


def test_under_a_launcher_the_signal_that_it_forwards_is_not_a_second_one():
    code = (
        "import os, signal, time\nfrom run import signals as interruption\n"
        "with interruption.Interruption() as asked:\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    print(asked.agreed(lambda item: [item]).name, flush=True)\n"
        "    interruption.FORWARDED_S = 0\n    os.kill(os.getpid(), signal.SIGTERM)\n    print('still here')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=os.environ | {"RANK": "1", "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == -signal.SIGTERM
    assert done.stdout.count("SIGTERM: ") == 1 and done.stdout.endswith("STOP\n")


@pytest.mark.parametrize("moment", ["evaluation", "saving", "last saving"])
def test_a_signal_at_an_odd_moment_loses_nothing(tmp_path, monkeypatch, moment):
    """In an evaluation: the step it belongs to is saved. While a checkpoint is written: it and the next step's are."""
    monkeypatch.chdir(ROOT)
    owner, name = (trainer.Trainer, "evaluate") if moment == "evaluation" else (CheckpointStore, "_write_files")
    inner, wanted, calls = getattr(owner, name), 3 if moment == "last saving" else 1, []

    def signalled(*words):
        calls.append(None)
        if len(calls) == wanted:
            send(signal.SIGUSR1)
            send(signal.SIGUSR1)
            send(signal.SIGTERM)
            if moment == "saving":
                time.sleep(0.2)  # the main thread, which hears signals, is in the next step
        return inner(*words)

    monkeypatch.setattr(owner, name, signalled)
    lines = (ROOT / "models/tiny_qwen3/problems_heldout.jsonl").read_text().splitlines()[:4]
    (tmp_path / "heldout.jsonl").write_text("\n".join(lines))
    settings = [f"eval.path={tmp_path}/heldout.jsonl", "eval.every=1", "eval.samples_per_prompt=1"]
    run_dir = tmp_path / "run"
    assert run(run_dir, *settings, "train.steps=3", "train.save_every=1", "train.check=false") == 0
    done = [row["step"] for row in metrics(run_dir)]
    assert done == {"evaluation": [1], "saving": [1, 2], "last saving": [1, 2, 3]}[moment]
    assert all("eval_avg_at_k" in row for row in metrics(run_dir))
    saved = sorted(p.name for p in (run_dir / "checkpoints").iterdir())
    assert saved == ["latest", *(f"step_{step}" for step in done)]
    assert (run_dir / "checkpoints/latest").read_text() == f"step_{done[-1]}\n"
