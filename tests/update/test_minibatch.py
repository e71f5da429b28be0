"""Which trajectories train, in which update, over which denominator; the same whatever the ranks and micro-batches."""

from __future__ import annotations

import pytest

from config import parse_config
from rollout.records import StopReason
from tests.support.builders import record, scored
from update.minibatch import plan_updates, why_no_update

SPREAD = (0, 1, 4, 5, 6, 7)  # rows of the groups with a spread
POLICIES = ("dapo", "grpo", "dr_grpo", "gspo", "cispo")


def config(max_tokens: int = 64, updates: int = 1, **loss):
    return parse_config({
        "model": {"path": "m"}, "data": {"path": "d"}, "loss": loss,
        "rollout": {"context_length": 16, "max_new_tokens": 8, "max_turns": 4, "trajectories_per_step": 16,
                    "samples_per_prompt": 2},
        "train": {"max_tokens_per_micro_batch": max_tokens, "updates_per_rollout": updates},
    })  # fmt: skip


def step(advantages=((1.0, -1.0), (0.0, 0.0), (0.5, -0.5), (1.0, -1.0), (0.0, 0.0)), stop=StopReason.ANSWERED):
    """Groups of two; row k of the step has ids from 100 k and 1 + k % 4 sampled tokens; one row was cut."""
    records, values = [], []
    for prompt, group in enumerate(advantages):
        for sample, advantage in enumerate(group):
            k = len(records)
            cut = StopReason.TURN_TOKENS if k == 0 else stop
            records.append(record("P" + "A" * (1 + k % 4), prompt=prompt, sample=sample, first_id=100 * k, stop=cut))
            values.append(advantage)
    return scored(records, values)


def rows(update) -> dict[int, tuple[float, int, float]]:
    """Row of the step -> (weight of its tokens, trained tokens, advantage), over all ranks."""
    found: dict[int, tuple[float, int, float]] = {}
    for batch in (b for rank in update for b in rank):
        for target, weight, advantage in zip(
            batch.targets.tolist(), batch.weights.tolist(), batch.advantages.tolist(), strict=True
        ):
            if weight:
                _, count, _ = found.get(target // 100, (0, 0, 0))
                found[target // 100] = (weight, count + 1, advantage)
    return found


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("updates", [1, 2, 3])
def test_ranks_and_micro_batches_do_not_change_an_update(policy, updates):
    whole = [rows(u) for u in plan_updates(step(), config(64, updates, policy=policy), 1)]
    assert len(whole) == updates
    for max_tokens, world in ((16, 1), (16, 2), (64, 3)):
        plan = plan_updates(step(), config(max_tokens, updates, policy=policy), world)
        assert [rows(u) for u in plan] == whole
        assert all(len({len(rank) for rank in u}) == 1 for u in plan)


@pytest.mark.parametrize(
    ("policy", "weights"),
    [
        # 10 rows of 1 2 3 4 1 2 3 4 1 2 tokens: 23; a budget of min(4 x 8, 16)
        ("dapo", dict.fromkeys(SPREAD, 1 / 23)),
        ("cispo", dict.fromkeys(SPREAD, 1 / 23)),
        ("grpo", {k: 1 / 10 / (1 + k % 4) for k in SPREAD}),
        ("gspo", {k: 1 / 10 / (1 + k % 4) for k in SPREAD}),
        ("dr_grpo", dict.fromkeys(SPREAD, 1 / 10 / 16)),
    ],
)
def test_equal_groups_are_not_trained_and_count_in_the_denominator(policy, weights):
    [update] = plan_updates(step(), config(policy=policy), 1)
    got = rows(update)
    assert {k: w for k, (w, _, _) in got.items()} == pytest.approx(weights, rel=1e-6)
    assert all(count == 1 + k % 4 for k, (_, count, _) in got.items())


@pytest.mark.parametrize("term", [{"kl_coef": 0.1}, {"router_balance": 0.1}])
def test_with_a_term_that_needs_no_advantage_equal_groups_are_trained_too(term):
    [update] = plan_updates(step(), config(**term), 1)
    assert sorted(rows(update)) == list(range(10))
    assert sum(w * n for w, n, _ in rows(update).values()) == pytest.approx(1.0, rel=1e-6)


def test_every_group_is_in_exactly_one_update_and_siblings_stay_together():
    updates = [rows(u) for u in plan_updates(step(), config(updates=3), 1)]
    assert [sorted(u) for u in updates] == [[0, 1], [4, 5], [6, 7]]
    # Group 1 counts in the first denominator (rows 0-3: 10 tokens), group 4 in the second (rows 4, 5, 8, 9: 6).
    assert [next(iter(u.values()))[0] for u in updates] == pytest.approx([1 / 10, 1 / 6, 1 / 7])


def test_fewer_groups_with_a_spread_make_fewer_updates():
    [update] = plan_updates(step(((1.0, -1.0), (0.0, 0.0), (0.0, 0.0))), config(updates=4), 1)
    assert next(iter(rows(update).values()))[0] == pytest.approx(1 / 13)  # every equal group still counts
    assert plan_updates(step(((0.0, 0.0),)), config(updates=4), 1) == []
    assert plan_updates([], config(), 1) == []


def test_a_masked_cut_trajectory_trains_nowhere_and_counts_nowhere():
    [update] = plan_updates(step(), config(overlong_mask=True), 1)
    got = rows(update)
    assert sorted(got) == [1, 4, 5, 6, 7]
    assert got[1][0] == pytest.approx(1 / 22)  # its one token left the denominator
    assert got[1][2] == -1.0  # its sibling's advantage still compares with it


def test_where_everything_was_cut_and_masked_there_is_no_update():
    assert plan_updates(step(stop=StopReason.CONTEXT_FULL), config(overlong_mask=True), 1) == []


def test_why_there_is_no_update_is_told_by_what_took_the_rows_out():
    same = step(advantages=((0.0, 0.0), (0.0, 0.0)), stop=StopReason.CONTEXT_FULL)
    cut = step(stop=StopReason.CONTEXT_FULL)
    for rows, settings, words in (
        (same, config(), "all rewards of each group are equal"),
        (same, config(overlong_mask=True), "all rewards of each group are equal"),
        (cut, config(overlong_mask=True), "ran out of tokens"),
        (same, config(overlong_mask=True, kl_coef=0.1), "ran out of tokens"),  # equal groups would be trained
    ):
        assert plan_updates(rows, settings, 1) == []
        assert words in why_no_update(rows, settings)
