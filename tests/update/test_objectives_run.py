"""Whole runs with everything switched on at once: two ranks equal one, a resume is exact, the audit agrees."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

import main as program
from tests.support.launch import finished_run, metrics, numbers, run, trajectories, weights
from tests.support.ranks import launch
from update.update import batch_loss

ALL_ON = (
    "loss.policy=gspo", "loss.kl_coef=0.01", "loss.importance=sequence", "loss.overlong_buffer=8",
    "loss.overlong_mask=true", "rollout.max_refills=1", "train.updates_per_rollout=2", "train.learning_rate=1e-4",
)  # fmt: skip
SETS = [word for setting in ALL_ON for word in ("--set", setting)]


pytestmark = pytest.mark.usefixtures("in_the_repository")


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    return finished_run(tmp_path_factory.mktemp("straight"), *ALL_ON)


def test_the_figures_say_what_was_done(straight):
    rows = metrics(straight)
    assert any(row["refills"] for row in rows)
    trained = [row for row in rows if not row["skipped"]]
    assert any(len(row["by_update"]) == 2 for row in trained if "by_update" in row)
    for row in trained:
        assert row["mismatch_max"] <= 1e-5  # at the weights that sampled, over both mini-batches
        assert row["ratio_error"] == 0.0 or "stale_max" in row
        assert row["bad_updates"] == 0
    assert trained[0]["kl"] < trained[-1]["kl"]


def test_a_resumed_run_continues_bit_for_bit(straight, tmp_path):
    shutil.copytree(straight, tmp_path / "run")
    shutil.rmtree(tmp_path / "run/checkpoints/step_4")
    assert run(tmp_path / "run", *ALL_ON, resume=True) == 0
    assert numbers(tmp_path / "run") == numbers(straight)
    for step in (3, 4):
        assert trajectories(tmp_path / "run", step) == trajectories(straight, step)
    for name, value in weights(straight / "checkpoints/step_4").items():
        assert torch.equal(weights(tmp_path / "run/checkpoints/step_4")[name], value), name


def test_two_ranks_have_the_figures_of_one(straight, tmp_path):
    launch(tmp_path, 2, *SETS, "--set", "train.max_tokens_per_micro_batch=16384", "--set", "train.save_every=2")
    for one, two in zip(metrics(straight), metrics(tmp_path), strict=True):
        assert {k: two[k] for k in ("reward", "refills", "kept_trajectories", "stops", "skipped")} == {
            k: one[k] for k in ("reward", "refills", "kept_trajectories", "stops", "skipped")
        }
        for name in ("loss", "grad_norm", "kl", "importance_mean", "stale_p99", "stale_ess", "stale_k3"):
            if name in one:
                assert two[name] == pytest.approx(one[name], rel=1e-3, abs=1e-6), name
    for step in (1, 2):
        assert trajectories(tmp_path, step) == trajectories(straight, step)


def test_the_audit_recomputes_what_it_can_and_says_what_it_cannot(straight, tmp_path, capsys):
    assert program.main(["audit", str(straight), "--no-tools"]) == 0
    assert "not recomputed: loss.kl_coef is above 0" in capsys.readouterr().out
    settings = ("train.updates_per_rollout=4", "loss.old_policy=update", "loss.overlong_mask=true",
                "rollout.max_refills=1", "loss.overlong_buffer=8", "loss.policy=dr_grpo")  # fmt: skip
    assert run(tmp_path / "run", *settings) == 0
    capsys.readouterr()
    assert program.main(["audit", str(tmp_path / "run"), "--no-tools"]) == 0
    count = sum(
        len(row["by_update"]) if "by_update" in row else not row["skipped"] for row in metrics(tmp_path / "run")
    )
    assert count > 4
    assert f"{count} losses recomputed; 0 differ" in capsys.readouterr().out


def test_steps_that_are_not_finite_end_the_run_with_their_batches_kept(tmp_path, capsys):
    settings = ("train.max_bad_steps=2", "train.steps=3", "train.save_every=0")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("update.update.batch_loss", _spoilt)
        assert run(tmp_path / "run", *settings) == 2
    message = capsys.readouterr().err
    assert "step 2: loss or gradient not finite in 2 steps in a row" in message and message.count("\n") == 1
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], row["bad_updates"], row["loss"]) for row in rows] == [(1, 1, None), (2, 1, None)]
    assert len(list((tmp_path / "run/bad_steps").iterdir())) == 2


def _spoilt(*args):
    value, columns = batch_loss(*args)
    return value * float("nan"), columns
