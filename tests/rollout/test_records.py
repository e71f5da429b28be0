"""A record refuses to be built inconsistent, naming its prompt and sample."""

from __future__ import annotations

import dataclasses

import pytest

from rollout.records import RolloutRecord, StopReason, Turn

GOOD = RolloutRecord(
    prompt_index=3,
    sample_index=1,
    policy_step=0,
    token_ids=(5, 6, 7, 8, 9, 10, 11),
    sampled=(False, False, True, True, False, False, True),
    logprobs=(0.0, 0.0, -0.1, -0.7, 0.0, 0.0, -0.2),
    turns=(Turn(start=2, end=4, ended=True), Turn(start=6, end=7, ended=True)),
    stop=StopReason.ANSWERED,
)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"token_ids": (5, 6)}, "lengths must agree"),
        ({"logprobs": GOOD.logprobs[:-1]}, "lengths must agree"),
        ({"logprobs": (-0.5, *GOOD.logprobs[1:])}, "was not sampled"),
        ({"logprobs": (*GOOD.logprobs[:-1], 0.3)}, "at most 0"),
        ({"logprobs": (*GOOD.logprobs[:-1], float("nan"))}, "finite"),
        ({"logprobs": (*GOOD.logprobs[:-1], float("-inf"))}, "finite"),
        ({"sampled": (False,) * 7, "logprobs": (0.0,) * 7}, "no sampled token"),
        ({"turns": ()}, "no sampled token"),
        ({"turns": GOOD.turns[:1]}, "union of the turns"),
        ({"turns": GOOD.turns[::-1]}, "out of order"),
        ({"turns": (Turn(start=2, end=4, ended=True), Turn(start=6, end=9, ended=True))}, "outside the 7 tokens"),
        ({"turns": (Turn(start=2, end=2, ended=True), Turn(start=6, end=7, ended=True))}, "is empty"),
    ],
)
def test_an_inconsistent_record_is_refused(change, words):
    with pytest.raises(ValueError, match=words) as error:
        dataclasses.replace(GOOD, **change)
    assert "prompt 3, sample 1" in str(error.value)


def test_a_turn_at_the_very_start_is_refused_since_nothing_predicts_its_first_token():
    with pytest.raises(ValueError, match="no prompt token"):
        dataclasses.replace(
            GOOD, token_ids=(1,), sampled=(True,), logprobs=(-1.0,), turns=(Turn(start=0, end=1, ended=True),)
        )


def test_the_end_of_turn_token_counts_as_sampled():
    assert GOOD.num_sampled == 3
    assert GOOD.final_turn.end == len(GOOD.token_ids)
