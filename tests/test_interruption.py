"""Signals are obeyed between two steps, by every rank alike."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from interruption import Interruption, Request


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


def test_the_handlers_of_before_are_back_afterwards():
    before = signal.getsignal(signal.SIGTERM)
    with Interruption():
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_second_term_ends_the_process_at_once():
    code = (
        "import os, signal\nfrom interruption import Interruption\n"
        "with Interruption():\n    os.kill(os.getpid(), signal.SIGTERM)\n    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    print('still here')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == -signal.SIGTERM
    assert "still here" not in done.stdout
