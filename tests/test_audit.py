"""The audit agrees with an honest run and notices every number that is changed."""

from __future__ import annotations

import json

import pytest

from audit import audit
from tests.test_engine import FakeTool, Result

TEXTS = {1: r"\boxed{7}", 2: r"\boxed{8}", 3: "no box"}
CONFIG = {"reward": {"scale": "none", "tool_bonus": 0.0}, "loss": {"policy": "dapo"}}
CALL = {"name": "python", "code": "print(7)", "status": "ok", "text": "7", "seed": 5, "wall_s": 0.1}


def rows() -> list[dict]:
    rewards = [1.0, -1.0, -1.0, 1.0]
    return [
        {
            "prompt_index": 0, "sample_index": i, "token_ids": [9, token], "sampled": [0, 1],
            "turns": [{"start": 1, "end": 2, "calls": [dict(CALL)]}], "stop": "answered", "answer": "7",
            "reward": reward, "advantage": reward,
        }
        for i, (token, reward) in enumerate(zip([1, 2, 3, 1], rewards, strict=True))
    ]  # fmt: skip


def metrics() -> dict:
    return {"step": 1, "reward": 0.0, "loss": 0.0, "skipped": False}


def run_audit(tmp_path, row_list, metric, config=CONFIG):
    (tmp_path / "trajectories").mkdir(exist_ok=True)
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "metrics.jsonl").write_text(json.dumps(metric) + "\n")
    lines = "".join(json.dumps(row) + "\n" for row in row_list)
    (tmp_path / "trajectories/step_1.jsonl").write_text(lines)
    tool = FakeTool(lambda code: Result("ok", "7"))
    return audit(tmp_path, lambda ids: TEXTS[ids[0]], tool)


def test_an_honest_run_agrees(tmp_path):
    counts, problems = run_audit(tmp_path, rows(), metrics())
    assert problems == []
    assert counts == {"steps": 1, "rewards": 4, "calls": 4}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda r, m: r[0].update(reward=-1.0), "sample 0 has reward -1.0, recomputed 1.0"),
        (lambda r, m: r[1].update(stop="turn_tokens", reward=1.0), "sample 1 has reward 1.0, recomputed -1.0"),
        (lambda r, m: r[2].update(advantage=1.0), "sample 2 has advantage 1.0, recomputed -1.0"),
        (lambda r, m: m.update(reward=0.5), "reward is 0.5, recomputed 0.0"),
        (lambda r, m: m.update(loss=0.01), "loss is 0.01, recomputed"),
        (lambda r, m: r[3]["turns"][0]["calls"][0].update(text="8"), "gave ok '8', again ok '7'"),
        (lambda r, m: r[3]["turns"][0]["calls"][0].update(status="error"), "gave error '7', again ok '7'"),
    ],
)
def test_a_changed_number_is_noticed(tmp_path, change, words):
    row_list, metric = rows(), metrics()
    change(row_list, metric)
    _, problems = run_audit(tmp_path, row_list, metric)
    assert any(words in problem for problem in problems), problems


def test_unequal_lengths_tell_token_mean_from_trajectory_mean(tmp_path):
    row_list = rows()
    row_list[0]["sampled"] = [0, 1, 1, 1]
    token_mean = -(3 - 1 - 1 + 1) / 6
    assert run_audit(tmp_path, row_list, metrics() | {"loss": token_mean})[1] == []
    grpo = CONFIG | {"loss": {"policy": "grpo"}}
    assert run_audit(tmp_path, row_list, metrics() | {"loss": 0.0}, grpo)[1] == []
    assert run_audit(tmp_path, row_list, metrics() | {"loss": token_mean}, grpo)[1] != []


def test_a_spoilt_trajectory_is_left_out(tmp_path):
    spoilt = rows()[0] | {"stop": "tool_infra", "reward": None, "advantage": None}
    assert run_audit(tmp_path, [*rows(), spoilt], metrics())[1] == []


def test_shaped_rewards_are_recomputed_too(tmp_path):
    config = CONFIG | {"reward": {"scale": "none", "tool_bonus": 0.5}}
    shaped = rows()
    for row, reward in zip(shaped, [1.0, -0.5, -0.5, 1.0], strict=True):
        row.update(reward=reward, advantage=0.75 if reward > 0 else -0.75)
    metric = metrics() | {"reward": 0.25}
    assert run_audit(tmp_path, shaped, metric, config)[1] == []
    shaped[1]["turns"][0]["calls"] = []
    _, problems = run_audit(tmp_path, shaped, metric, config)
    assert any("sample 1 has reward -0.5, recomputed -1.0" in problem for problem in problems)
