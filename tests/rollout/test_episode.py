"""How a turn ends, and what the record of the whole holds."""

from __future__ import annotations

import pytest

from rollout.episode import Episode, TurnEnd
from rollout.records import SamplingConfig, StopReason, Turn

STOP = {9}


def episode(prompt=(1, 2, 3), **limits) -> Episode:
    settings = {"max_new_tokens": 4, "max_turns": 3, "context_length": 20} | limits
    sampling = SamplingConfig(temperature=1.0, n_samples_per_prompt=2, seed=0, **settings)
    return Episode(prompt, prompt_index=1, sample_index=0, policy_step=5, sampling=sampling)


def test_a_stop_token_ends_the_turn_and_is_part_of_it():
    e = episode()
    assert [e.draw(t, -0.5, STOP) for t in (4, 5, 9)] == [TurnEnd.OPEN, TurnEnd.OPEN, TurnEnd.ENDED]
    e.close_turn(ended=True)
    record = e.finish(StopReason.ANSWERED)
    assert record.token_ids == (1, 2, 3, 4, 5, 9)
    assert record.sampled == (False, False, False, True, True, True)
    assert record.logprobs == (0.0, 0.0, 0.0, -0.5, -0.5, -0.5)
    assert record.turns == (Turn(start=3, end=6, ended=True),)
    assert record.policy_step == 5


def test_a_turn_is_cut_at_its_token_limit_and_the_stop_token_as_the_last_one_still_ends_it():
    e = episode(max_new_tokens=2)
    assert [e.draw(t, -1.0, STOP) for t in (4, 5)] == [TurnEnd.OPEN, TurnEnd.CUT]
    e = episode(max_new_tokens=2)
    assert [e.draw(t, -1.0, STOP) for t in (4, 9)] == [TurnEnd.OPEN, TurnEnd.ENDED]


def test_the_context_limit_counts_every_token_of_the_line():
    e = episode(context_length=5)
    assert [e.draw(t, -1.0, STOP) for t in (4, 5)] == [TurnEnd.OPEN, TurnEnd.FULL]


def test_a_suffix_is_never_sampled_and_opens_the_next_turn():
    e = episode()
    e.draw(9, -1.0, STOP)
    e.close_turn(ended=True)
    e.append_suffix([9, 9, 7])  # a stop token inside a tool result ends nothing
    assert e.draw(4, -2.0, STOP) is TurnEnd.OPEN
    assert e.turn_ids == [4]
    assert e.draw(9, -2.0, STOP) is TurnEnd.ENDED
    e.close_turn(ended=True)
    record = e.finish(StopReason.ANSWERED)
    assert record.sampled == (False,) * 3 + (True,) + (False,) * 3 + (True,) * 2
    assert [(t.start, t.end) for t in record.turns] == [(3, 4), (7, 9)]


def test_room_is_counted_with_one_token_to_sample():
    e = episode(context_length=8)
    assert e.has_room_for([0] * 4)
    assert not e.has_room_for([0] * 5)


def test_the_last_turn_is_known_before_it_closes():
    e = episode(max_turns=2)
    assert not e.is_last_turn
    e.draw(9, -1.0, STOP)
    e.close_turn(ended=True)
    assert e.is_last_turn


@pytest.mark.parametrize("length", [0, 20, 21])
def test_a_prompt_without_room_for_a_token_is_refused(length):
    with pytest.raises(ValueError, match=f"prompt 1 has {length} tokens"):
        episode(prompt=[1] * length)
