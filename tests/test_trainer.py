"""The step: skipped where nothing can be learnt, stopped where the sandbox is broken; its rate follows the step."""

from __future__ import annotations

import dataclasses

import pytest

from config import TrainConfig, parse_config
from data import Problem, TrainingData
from policy import init_distributed
from rollout.records import StopReason
from run.console import PlainConsole
from run.writers import RunWriter
from tests.support.builders import record
from tests.support.fakes import fake_parts
from tests.support.policies import CPU
from trainer import InfraError, Trainer, learning_rate


def trainer(tmp_path, records, prompts=2):
    init_distributed(CPU)
    config = parse_config({
        "model": {"path": "m"}, "data": {"path": "d", "shuffle": False},
        "rollout": {"trajectories_per_step": 2 * prompts, "samples_per_prompt": 2},
    })  # fmt: skip
    problems = [Problem("x", "12", line) for line in range(prompts)]
    data = TrainingData(problems, [[1]] * prompts)
    writer = RunWriter(tmp_path, None, PlainConsole(steps=1))
    made = [dataclasses.replace(r) for r in records]
    return Trainer(fake_parts(config, data, lambda *_: made), tmp_path, writer)


def group(prompt: int, spans: tuple[str, str], **options):
    return [record(s, prompt=prompt, sample=i, **options) for i, s in enumerate(spans)]


def test_a_step_whose_groups_are_all_equal_is_skipped_and_still_written(tmp_path):
    row = trainer(tmp_path, group(0, ("PPA", "PPA")) + group(1, ("PAA", "PAA"))).train_step(0)
    assert row["skipped"] is True
    assert row["nothing_trained"] == "all rewards of each group are equal"
    assert row["equal_groups"] == 1.0
    assert row["correct"] == 1.0  # ids 10, 11, 12: the last is 12
    assert (tmp_path / "trajectories/step_1.parquet").exists()


def test_rewards_come_from_the_final_turn_and_the_groups_own_answer(tmp_path):
    t = trainer(tmp_path, group(0, ("PPA", "PPAA")) + group(1, ("PA", "PPA")))
    scored = t._sample_groups(0).scored
    assert [s.reward for s in scored] == [1.0, -1.0, -1.0, 1.0]
    assert [s.advantage for s in scored] == [1.0, -1.0, -1.0, 1.0]


def test_more_than_one_per_cent_of_infrastructure_failures_stops_training(tmp_path):
    spoilt = group(0, ("PPA", "PPA"), stop=StopReason.TOOL_INFRA)
    with pytest.raises(InfraError, match="2 of 4 trajectories"):
        trainer(tmp_path, spoilt + group(1, ("PA", "PA"))).train_step(0)


def test_fewer_are_dropped_and_counted(tmp_path):
    records = [r for p in range(100) for r in group(p, ("PPA", "PA"))]
    records[0] = dataclasses.replace(records[0], stop=StopReason.TOOL_INFRA)
    t = trainer(tmp_path, records, prompts=100)
    scored = t._sample_groups(0).scored
    assert len(scored) == 199
    assert scored[0].advantage == 0.0  # its only sibling is gone: nothing to compare it with


def test_the_learning_rate_warms_up_and_falls_to_zero_at_the_last_step():
    train = TrainConfig(steps=6, learning_rate=1.0, warmup_steps=2, schedule="linear")
    assert [learning_rate(step, train) for step in range(6)] == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    constant = TrainConfig(steps=6, learning_rate=1.0, warmup_steps=2)
    assert [learning_rate(step, constant) for step in range(6)] == [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]
