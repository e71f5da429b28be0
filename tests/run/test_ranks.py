"""Two processes give the trajectories and losses of one, with uneven and with no work; and resume exactly together."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections import Counter

import pytest
import torch

from policy import init_distributed
from run.ranks import Ranks
from tests.support.launch import ROOT, metrics, numbers, trajectories, weights
from tests.support.ranks import command, launch


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    for ranks in (1, 2):
        launch(folder / str(ranks), ranks)
    return folder


def test_what_is_dealt_goes_to_one_rank_each_and_none_may_hold_more_than_an_even_part():
    init_distributed(torch.device("cpu"))
    alone = Ranks()
    work = alone.deal("step 1", 12, first=4)
    assert [work.take() for _ in range(3)] == [4, 5, 6] and work.share == 8

    class Store(Counter):
        def add(self, name, amount):
            self[name] += amount
            return self[name]

    alone.world_size, alone._store = 3, Store()
    first, second = (alone.deal("step 2", 12, first=4) for _ in range(2))
    assert [first.take(), second.take(), first.take()] == [4, 5, 6]
    assert first.share == 3 and alone.deal("step 3", 6).take() == 0


def test_two_ranks_sample_the_trajectories_of_one(runs):
    for step in (1, 2, 3, 4):
        assert trajectories(runs / "2", step) == trajectories(runs / "1", step)


def test_two_ranks_report_the_losses_of_one(runs):
    for one, two in zip(numbers(runs / "1"), numbers(runs / "2"), strict=True):
        for name in ("loss", "grad_norm", "entropy"):
            assert two[name] == pytest.approx(one[name], rel=1e-5, abs=1e-7), name
        assert {k: two[k] for k in ("reward", "tokens", "stops", "reasons")} == {
            k: one[k] for k in ("reward", "tokens", "stops", "reasons")
        }


def test_the_figures_of_a_rollout_are_those_of_all_ranks(runs):
    for ranks in ("1", "2"):
        for row in metrics(runs / ranks):
            assert row["rollout_decode_tokens"] == row["sampled_tokens"]


def test_two_ranks_end_with_the_weights_of_one(runs):
    one, two = (weights(runs / ranks / "checkpoints/step_4") for ranks in ("1", "2"))
    for name, value in one.items():
        assert (two[name] - value).norm() <= 1e-4 * value.norm(), name


def test_two_ranks_killed_and_resumed_equal_two_ranks_that_ran_through(runs, tmp_path):
    process = subprocess.Popen(
        command(tmp_path, 2), cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    while not (tmp_path / "checkpoints/step_2/state.json").exists():
        assert process.poll() is None
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    launch(tmp_path, 2, "--resume")
    assert numbers(tmp_path) == numbers(runs / "2")
    for step in (1, 2, 3, 4):
        assert trajectories(tmp_path, step) == trajectories(runs / "2", step)
    for name, value in weights(runs / "2/checkpoints/step_4").items():
        assert torch.equal(weights(tmp_path / "checkpoints/step_4")[name], value), name


def test_another_number_of_ranks_takes_weights_and_data_and_says_what_stays_behind(runs, tmp_path):
    shutil.copytree(runs / "2", tmp_path / "run")
    for step in (3, 4):
        shutil.rmtree(tmp_path / f"run/checkpoints/step_{step}")
    output = launch(tmp_path / "run", 1, "--resume")
    assert "weights and data carry over" in output
    assert trajectories(tmp_path / "run", 3) == trajectories(runs / "2", 3)  # sampled from the weights of step 2
    assert [row["step"] for row in numbers(tmp_path / "run")] == [1, 2, 3, 4]
