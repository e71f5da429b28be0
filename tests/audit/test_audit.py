"""The audit agrees with an honest run and notices every number that is changed."""

from __future__ import annotations

import json

import pytest

from audit.audit import _is_right, audit, summary
from config import parse_config
from reward import grade
from run.trajectories import TrajectoryError, step_path
from tests.support.builders import write_rows
from tests.support.engines import FakeTool, Result

TEXTS = {1: r"\boxed{7}", 2: r"\boxed{8}", 3: "no box"}
CONFIG = json.loads(parse_config({"model": {"path": "m"}, "data": {"path": "d"}}).to_json())
CALL = {"name": "python", "arguments": {"code": "print(7)"}, "status": "ok", "text": "7", "seed": 5, "wall_s": 0.1}


def rows() -> list[dict]:
    rewards = [1.0, -1.0, -1.0, 1.0]
    return [
        {
            "prompt_index": 0, "sample_index": i, "token_ids": [9, token], "sampled": [0, 1], "logprobs": [0.0, -0.5],
            "turns": [{"start": 1, "end": 2, "calls": [dict(CALL)]}], "stop": "answered", "answer": "7",
            "reward": reward, "advantage": reward,
        }
        for i, (token, reward) in enumerate(zip([1, 2, 3, 1], rewards, strict=True))
    ]  # fmt: skip


def metrics() -> dict:
    return {"step": 1, "reward": 0.0, "loss": 0.0, "skipped": False, "mismatch_max": 0.0}


def run_audit(tmp_path, row_list, metric, config=CONFIG):
    (tmp_path / "trajectories").mkdir(exist_ok=True)
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "metrics.jsonl").write_text(json.dumps(metric) + "\n")
    write_rows(tmp_path, 1, row_list)
    tool = FakeTool(lambda code: Result("ok", "7"))
    return audit(tmp_path, lambda ids: TEXTS[ids[0]], tool)


def test_an_honest_run_agrees(tmp_path):
    counts, problems, missing = run_audit(tmp_path, rows(), metrics())
    assert (problems, missing) == ([], [])
    assert counts == {"steps": 1, "rewards": 4, "losses": 1, "calls": 4}


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
    _, problems, _ = run_audit(tmp_path, row_list, metric)
    assert any(words in problem for problem in problems), problems


def changed(section: str = "loss", **values) -> dict:
    return CONFIG | {section: CONFIG[section] | values}


def unequal() -> list[dict]:
    """The first trajectory has three sampled tokens, the others one."""
    row_list = rows()
    row_list[0] |= {"sampled": [0, 1, 1, 1], "logprobs": [0.0, -0.5, -1.0, -2.0]}
    return row_list


def test_unequal_lengths_tell_token_mean_from_trajectory_mean(tmp_path):
    row_list = unequal()
    token_mean = -(3 - 1 - 1 + 1) / 6
    assert run_audit(tmp_path, row_list, metrics() | {"loss": token_mean})[1] == []
    grpo = changed(policy="grpo")
    assert run_audit(tmp_path, row_list, metrics() | {"loss": 0.0}, grpo)[1] == []
    assert run_audit(tmp_path, row_list, metrics() | {"loss": token_mean}, grpo)[1] != []


def test_a_spoilt_trajectory_is_left_out(tmp_path):
    spoilt = rows()[0] | {"stop": "tool_infra", "reward": None, "advantage": None}
    assert run_audit(tmp_path, [*rows(), spoilt], metrics())[1] == []


def test_shaped_rewards_are_recomputed_too(tmp_path):
    config = changed("reward", tool_bonus=0.5)
    shaped = rows()
    for row, reward in zip(shaped, [1.0, -0.5, -0.5, 1.0], strict=True):
        row.update(reward=reward, advantage=0.75 if reward > 0 else -0.75)
    metric = metrics() | {"reward": 0.25}
    assert run_audit(tmp_path, shaped, metric, config)[1] == []
    shaped[1]["turns"][0]["calls"] = []
    problems = run_audit(tmp_path, shaped, metric, config)[1]
    assert any("sample 1 has reward -0.5, recomputed -1.0" in problem for problem in problems)


BUDGET = min(CONFIG["rollout"]["max_turns"] * CONFIG["rollout"]["max_new_tokens"], CONFIG["rollout"]["context_length"])


@pytest.mark.parametrize(
    ("policy", "loss"),
    [("gspo", 0.0), ("dr_grpo", -2 / (4 * BUDGET)), ("cispo", -(-3.5 + 0.5 + 0.5 - 0.5) / 6)],
)
def test_the_loss_of_each_policy_is_recomputed(tmp_path, policy, loss):
    config = changed(policy=policy)
    assert run_audit(tmp_path, unequal(), metrics() | {"loss": loss}, config)[1] == []
    assert run_audit(tmp_path, unequal(), metrics() | {"loss": loss + 0.01}, config)[1] != []


def test_cispo_is_compared_to_within_the_mismatch(tmp_path):
    metric = metrics() | {"loss": 0.5 + 0.01, "mismatch_max": 0.02}
    assert run_audit(tmp_path, unequal(), metric, changed(policy="cispo"))[1] == []


def test_the_overlong_penalty_and_mask_are_recomputed(tmp_path):
    row_list = unequal()
    row_list[1] |= {"stop": "turn_tokens"}
    masked = -(3 - 1 + 1) / 5  # the cut trajectory leaves the loss and the denominator
    assert run_audit(tmp_path, row_list, metrics() | {"loss": masked}, changed(overlong_mask=True))[1] == []
    rollout = changed("rollout", context_length=3, max_new_tokens=2)
    penalised = rollout | {"loss": CONFIG["loss"] | {"overlong_buffer": 2}}
    for row, advantage in zip(rows(), [1.0, -1.0, -1.0, 1.0], strict=True):
        assert row["advantage"] == advantage  # every room is 1 of the 2: the same penalty, the same advantages
    assert run_audit(tmp_path, rows(), metrics(), penalised)[1] == []
    longer = rows()
    longer[0]["token_ids"] = [9, 9, 1]
    longer[0]["turns"][0] |= {"start": 2, "end": 3}
    assert any("has advantage" in p for p in run_audit(tmp_path, longer, metrics(), penalised)[1])


def two_groups() -> list[dict]:
    """Three sampled tokens in the second group's first row; a third group is equal."""
    second = [row | {"prompt_index": 1} for row in unequal()]
    third = [row | {"prompt_index": 2, "reward": 1.0, "advantage": 0.0} for row in (rows()[0], rows()[3])]
    return rows() + second + third


def test_equal_groups_count_unless_refills_replaced_them(tmp_path):
    kept = metrics() | {"reward": 0.2, "loss": -2 / 12}
    assert run_audit(tmp_path, two_groups(), kept)[1] == []
    replaced = metrics() | {"reward": 0.2, "loss": -2 / 10}
    assert run_audit(tmp_path, two_groups(), replaced, changed("rollout", max_refills=1))[1] == []
    assert run_audit(tmp_path, two_groups(), kept, changed("rollout", max_refills=1))[1] != []


def test_of_several_updates_the_first_is_recomputed_and_the_others_are_named(tmp_path):
    several = changed("train", updates_per_rollout=2)
    metric = metrics() | {"reward": 0.2, "by_update": [{"loss": 0.0}, {"loss": -2 / 6}]}
    counts, problems, [missing] = run_audit(tmp_path, two_groups(), metric, several)
    assert (counts["losses"], problems) == (1, [])
    assert missing.startswith("1 losses not recomputed: later updates")
    anchored = several | {"loss": CONFIG["loss"] | {"old_policy": "update"}}
    counts, problems, missing = run_audit(tmp_path, two_groups(), metric, anchored)
    assert (counts["losses"], problems, missing) == (2, [], [])
    metric["by_update"][1]["loss"] = 0.5
    assert run_audit(tmp_path, two_groups(), metric, anchored)[1] != []
    assert "made 1 updates" in run_audit(tmp_path, two_groups(), metrics() | {"reward": 0.2}, several)[1][0]


@pytest.mark.parametrize("name", ["distill_weight", "router_balance"])
def test_a_teacher_and_a_balance_loss_train_equal_groups_too(tmp_path, name):
    alone = [rows()[0] | {"advantage": 0.0}]  # one sample of its prompt
    counts, problems, [missing] = run_audit(
        tmp_path, alone, metrics() | {"reward": 1.0, "loss": 0.4}, changed(**{name: 1.0})
    )
    assert (counts["losses"], problems) == (0, [])
    assert f"loss.{name}" in missing


@pytest.mark.parametrize(
    ("loss", "words"), [({"kl_coef": 0.1}, "loss.kl_coef"), ({"importance": "token"}, "loss.importance")]
)
def test_what_needs_a_model_is_said_not_passed_over(tmp_path, loss, words):
    counts, problems, [missing] = run_audit(tmp_path, rows(), metrics() | {"loss": 9.0}, changed(**loss))
    assert (counts["losses"], problems) == (0, [])
    assert words in missing


def test_a_step_that_was_skipped_wrongly_is_noticed(tmp_path):
    skipped = {"step": 1, "reward": 0.0, "skipped": True}
    assert "was skipped, but" in run_audit(tmp_path, rows(), skipped)[1][0]


def three_steps(tmp_path):
    run_audit(tmp_path, rows(), metrics())
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(metrics() | {"step": s}) + "\n" for s in (1, 2, 3)))
    for step in (1, 2, 3):
        write_rows(tmp_path, step, rows())


@pytest.mark.parametrize(
    ("gone", "said"),
    [
        ([1], "1"),  # as log.keep_trajectories drops them
        ([2], "2"),  # as people remove a damaged file
        ([3], "3"),
        ([1, 3], "1, 3"),
        ([1, 2], "1 to 2"),
    ],
)
def test_steps_without_trajectories_are_counted_and_named(tmp_path, gone, said):
    three_steps(tmp_path)
    for step in gone:
        step_path(tmp_path, step).unlink()
    counts, problems, missing = audit(tmp_path, lambda ids: TEXTS[ids[0]], None)
    left = 3 - len(gone)
    assert (problems, missing) == ([], [f"nothing recomputed of steps {said}: their trajectories are not kept"])
    assert counts == {"steps without trajectories": len(gone), "steps": left, "rewards": 4 * left, "losses": left}
    assert summary(counts, problems) == f"{left} of 3 steps, {4 * left} rewards, {left} losses recomputed; 0 differ"


def test_a_run_whose_trajectories_are_all_gone_is_refused(tmp_path):
    three_steps(tmp_path)
    for step in (1, 2, 3):
        step_path(tmp_path, step).unlink()
    with pytest.raises(TrajectoryError, match="the trajectories of all steps are gone"):
        audit(tmp_path, lambda ids: TEXTS[ids[0]], None)


@pytest.mark.parametrize(
    ("said", "answer", "right"),
    [
        ("{5}", "5", True), (r"\frac{ 1 }{ 2 }", "1/2", True), (r"\frac{1.5}{3}", "1/2", True),
        ("(1, 2)", "(1,2)", True),
        ("1e2", "100", False), ("1_000", "1000", False), ("５", "5", False), ("5..", "5", False),
        ("1e9999999", "77", False), ("042", "42", True), ("1,234", "1234", True), (r"\frac12", "0.5", True),
    ],
)  # fmt: skip
def test_the_audits_own_grader_follows_the_rule(said, answer, right):
    row = {"stop": "answered", "turns": [{"start": 0, "end": 1}], "token_ids": [0], "answer": answer}
    assert _is_right(row, lambda ids: rf"so \boxed{{{said}}}") is right
    assert grade(rf"so \boxed{{{said}}}", answer).correct is right
