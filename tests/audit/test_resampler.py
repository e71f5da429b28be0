"""A recorded trajectory is sampled again alone; teacher forcing makes the draws that sampling made."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch

from audit import replay
from audit.replay import Resampler
from modeling.attention import SOFTMAX
from tests.support.engines import FakeTool, generate, make_engine, sampling


@pytest.fixture(scope="module")
def records(model, chat):
    return generate(make_engine(model, chat, FakeTool()), chat)


def replayer(model, chat):
    return Resampler(make_engine(model, chat, FakeTool()), model, SOFTMAX["auto"], sampling())


def row_of(record) -> dict:
    return dataclasses.asdict(record)


def places(record) -> list[int]:
    return [place for place, drawn in enumerate(record.sampled) if drawn]


def test_one_trajectory_alone_is_the_one_of_the_full_batch(records, model, chat):
    for record in (records[1], records[-1]):
        new = replayer(model, chat).sample(row_of(record))
        assert (new.token_ids, new.logprobs, new.stop) == (record.token_ids, record.logprobs, record.stop)
        assert (new.prompt_index, new.sample_index) == (record.prompt_index, record.sample_index)


def test_forced_draws_are_the_recorded_ones(records, model, chat):
    for record in records:
        draws = replayer(model, chat).force(row_of(record), places(record))
        assert draws.tokens == [record.token_ids[place] for place in places(record)]
        assert draws.margins == [0.0] * len(draws.tokens)
        assert draws.logprobs == pytest.approx([record.logprobs[place] for place in places(record)], abs=1e-5)


def test_other_weights_draw_otherwise_by_the_margin_of_their_scores(records, model, chat):
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    draws = [replayer(other, chat).force(row_of(record), places(record)) for record in records]
    changed = [
        (token != record.token_ids[place], margin)
        for record, one in zip(records, draws, strict=True)
        for place, token, margin in zip(places(record), one.tokens, one.margins, strict=True)
    ]
    assert any(differs for differs, _ in changed)
    assert all((margin > 0) == differs for differs, margin in changed)


def test_forcing_in_chunks_changes_nothing(records, model, chat, monkeypatch):
    record = records[0]
    whole = replayer(model, chat).force(row_of(record), places(record))
    monkeypatch.setattr(replay, "CHUNK_LOGITS", 40 * model.config.vocab_size)
    assert replayer(model, chat).force(row_of(record), places(record)).tokens == whole.tokens
