"""Groups without a spread are found and dropped whole; a step counts what it sampled."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from rollout.records import StopReason
from rollout.stats import RolloutStats
from tests.support.builders import record, scored
from update import groups
from update.groups import by_prompt, count_reasons, equal_share, is_equal, without_equal_groups


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
