"""The smoke config at its true shape, random weights, on a GPU: graphs on, losses recomputed from what is stored."""

from __future__ import annotations

import json
import math

import pytest
import torch

import main as program
import trainer
from audit import losses
from reward import Grade, Reason
from run.trajectories import read_step
from tests.support.launch import ROOT, metrics

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
OFFLINE = [
    "model.random_weights=true", "model.tokenizer_path=models/tiny_qwen3",
    "data.path=models/tiny_qwen3/problems.jsonl", "data.system_prompt=",
    "tool.preload=[]", "rollout.max_new_tokens=256",
]  # fmt: skip


def grade_by_chance(text, stop, answer):
    """Random weights never box an answer; rewards that differ let the update run."""
    right = len(text) % 2 == 0
    return Grade(right, Reason.CORRECT if right else Reason.NO_BOX)


def run(run_dir, *settings: str, config: str = "smoke_qwen3_0.6b") -> int:
    sets = [word for setting in (*OFFLINE, *settings) for word in ("--set", setting)]
    return program.main(["--config", f"configs/{config}.json", "--run-dir", str(run_dir), *sets])


@pytest.mark.parametrize("graphs", ["true", "false"])
def test_three_steps_train_and_every_loss_equals_the_recomputed_one(tmp_path, monkeypatch, graphs):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(trainer, "grade_trajectory", grade_by_chance)
    assert run(tmp_path, "train.steps=3", f"rollout.cuda_graphs={graphs}") == 0
    trained, config = 0, json.loads((tmp_path / "config.json").read_text())
    for row in metrics(tmp_path):
        print(json.dumps({k: v for k, v in row.items() if not isinstance(v, dict)}))
        if row["skipped"]:
            continue
        trained += 1
        expected, _ = losses.loss_of(read_step(tmp_path, row["step"]), config)
        assert math.isclose(row["loss"], expected, rel_tol=1e-4, abs_tol=1e-6)
        assert row["ratio_error"] == 0.0
        assert row["mismatch_mean"] <= 0.01  # bf16's own noise at random weights: see benchmarks/RESULTS.md
        assert row["mismatch_k3"] <= 1e-4
    assert trained
    print(f"peak {torch.cuda.max_memory_allocated() / 1e9:.1f} GB allocated, "
          f"{torch.cuda.max_memory_reserved() / 1e9:.1f} GB reserved")  # fmt: skip


@pytest.mark.parametrize("graphs", ["true", "false"])
def test_a_distilled_student_is_sampled_with_and_without_graphs(tmp_path, monkeypatch, graphs):
    monkeypatch.chdir(ROOT)
    assert run(tmp_path, "train.steps=2", f"rollout.cuda_graphs={graphs}", config="smoke_opsd") == 0
    for row in metrics(tmp_path):
        assert row["ratio_error"] == 0.0 and row["mismatch_mean"] <= 0.01
        assert row["loss"] == pytest.approx(row["teacher_divergence"], rel=1e-3)
        assert row["teacher_divergence"] > 0.0 and row["grad_norm"] > 0.0
