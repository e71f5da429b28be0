"""Groups without a spread are found and dropped whole; the overlong penalty shapes advantages, never rewards."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from config import parse_config
from rollout.records import StopReason
from rollout.stats import RolloutStats
from tests.support.builders import record, scored
from tests.support.oracle import mutant
from update import groups
from update.groups import (
    by_prompt,
    count_reasons,
    equal_share,
    is_equal,
    overlong_penalty,
    with_overlong_penalty,
    without_equal_groups,
)


def step(*advantages: tuple[float, ...]):
    records = [record("PAA", prompt=p, sample=i) for p, group in enumerate(advantages) for i, _ in enumerate(group)]
    return scored(records, [a for group in advantages for a in group])


def test_a_group_is_equal_where_no_member_has_an_advantage():
    items = step((0.0, 0.0), (1.0, -1.0), (0.0,))
    assert [is_equal(g) for g in by_prompt(items).values()] == [True, False, True]
    assert equal_share(items) == pytest.approx(2 / 3)
    assert {s.record.prompt_index for s in without_equal_groups(items)} == {1}


def test_a_member_of_advantage_zero_stays_with_its_group():
    items = step((1.0, 0.0, -1.0), (0.0, 0.0, 0.0))
    assert [s.advantage for s in without_equal_groups(items)] == [1.0, 0.0, -1.0]


def config(buffer: int, scale: str = "none"):
    return parse_config({
        "model": {"path": "m"}, "data": {"path": "d"}, "loss": {"overlong_buffer": buffer}, "reward": {"scale": scale},
        "rollout": {"context_length": 20, "max_new_tokens": 10, "trajectories_per_step": 8}})  # fmt: skip


@pytest.mark.parametrize(
    ("spans", "penalty"),
    [
        ("PAAAA", 0.0),  # 6 tokens of its turn left
        ("PAAAAAA", 0.0),  # 4: exactly the buffer
        ("PAAAAAAA", -0.25),  # 3 of the 10 of a turn
        ("PAAAAAAAAAA", -1.0),  # cut by the turn's tokens
        ("PAAAAOOOOOOOOOAAA", -0.25),  # 17 of 20 in the context
        ("PAAAAOOOOOOOOOAAAAAA", -1.0),  # the context is full
    ],
)
def test_the_penalty_falls_linearly_over_the_last_tokens_of_either_budget(spans, penalty):
    assert overlong_penalty(record(spans), config(4).rollout, 4) == penalty


@pytest.mark.parametrize(
    ("text", "replacement"),
    [("return -min(", "return min("), ("buffer - room", "room - buffer"), ("room = min(", "room = max(")],
)
def test_a_changed_term_of_the_penalty_is_noticed(text, replacement):
    changed = mutant(groups, text, replacement).overlong_penalty
    lines = ("PAAAA", "PAAAAAAA", "PAAAAOOOOOOOOOAAA")
    assert [changed(record(s), config(4).rollout, 4) for s in lines] != [0.0, -0.25, -0.25]


def test_the_penalty_shapes_the_advantages_and_leaves_the_rewards():
    items = scored([record("PAAAA", sample=0), record("PAAAAAAAAAA", sample=1)], [1.0, 1.0])
    shaped = with_overlong_penalty(items, config(4))
    assert [s.reward for s in shaped] == [1.0, 1.0]
    assert [s.advantage for s in shaped] == [0.5, -0.5]
    assert [s.advantage for s in with_overlong_penalty(items, config(4, "std"))] == [1.0, -1.0]


def test_without_a_buffer_nothing_changes():
    items = step((1.0, -1.0))
    assert with_overlong_penalty(items, config(0)) == items


def test_a_sample_alone_keeps_advantage_zero():
    assert with_overlong_penalty(step((0.0,)), config(4))[0].advantage == 0.0


def test_the_ledger_counts_every_trajectory_once_the_spoilt_ones_too():
    spoilt = record("PA", sample=2, stop=StopReason.TOOL_INFRA)
    sound = [record("PA"), record("PA", sample=1)]
    ledger = count_reasons([*sound, spoilt], scored(sound, [1.0, -1.0]))
    assert ledger == {"correct": 1, "no_box": 1, "tool_infra": 1}


def test_the_rates_of_a_rollout_follow_from_the_sums_over_its_rounds():
    step = groups.SampledStep()
    stats = {
        "seconds": 2.0, "prefill_tokens": 30, "decode_tokens": 100, "running_rows": 6, "row_slots": 8,
        "tool_seconds": 3.0, "tools_open_seconds": 1.0, "idle_seconds": 0.25,
    }  # fmt: skip
    step.add([], [], [], stats)
    step.add([], [], [], stats | {"idle_seconds": 0.75, "tool_seconds": 1.0})
    row = step.rollout_row()
    assert (row["rollout_prefill_tokens_per_second"], row["rollout_decode_tokens_per_second"]) == (15, 50)
    assert (row["rollout_occupancy"], row["rollout_tools_running"], row["rollout_tools_hidden"]) == (0.75, 1.0, 0.5)
    assert row["rollout_seconds"] == 4.0


def test_counts_of_ranks_add_up_and_their_wall_times_are_averaged():
    one = asdict(
        RolloutStats(seconds=2.0, idle_seconds=1.0, tools_open_seconds=1.0, tool_seconds=4.0, decode_tokens=30)
    )
    two = asdict(RolloutStats(seconds=4.0, tools_open_seconds=3.0, decode_tokens=60, preemptions=2))
    step = groups.SampledStep()
    step.add([], [], [], groups.over_ranks([one, two]))
    row = step.rollout_row()
    assert (row["rollout_decode_tokens"], row["rollout_preemptions"], row["rollout_seconds"]) == (90, 2, 3.0)
    assert row["rollout_decode_tokens_per_second"] == 30  # of both together
    assert row["rollout_tools_running"] == pytest.approx(4 / 3)
    assert row["rollout_tools_hidden"] == 0.75  # idle for 1 of 4 seconds


def test_every_wall_time_of_a_rollout_is_known_as_one():
    seconds = {name for name in RolloutStats.__slots__ if name.endswith("seconds")}
    assert seconds == {*groups.WALL_TIMES, "tool_seconds"}  # calls run side by side: theirs add up
