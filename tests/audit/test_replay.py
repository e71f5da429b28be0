"""A trajectory sampled again is compared to the bit, and a difference is traced to its first draw."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import pytest

from audit.replay import ReplayError, pick, replay, weights_before
from config import ModelConfig
from rollout.records import RolloutRecord, ToolCall
from run.trajectories import read_step, write_step
from tests.support.builders import record, scored


@dataclass(frozen=True)
class Draws:
    tokens: list[int]
    margins: list[float]
    logprobs: list[float]


CALL = ToolCall(name="python", arguments={"code": "print(7)"}, status="ok", text="7", seed=1, wall_s=0.1)


def made(**changes) -> RolloutRecord:
    """Ids 10 to 14; the first turn is id 12 and calls the tool, the second is id 14."""
    base = record("PPAOA")
    call = dataclasses.replace(CALL, **changes)
    logprobs = (0.0, 0.0, -0.25, 0.0, -0.5)
    return dataclasses.replace(
        base, logprobs=logprobs, turns=(dataclasses.replace(base.turns[0], calls=(call,)), base.turns[1])
    )


@pytest.fixture
def row(tmp_path):
    (tmp_path / "trajectories").mkdir()
    write_step(tmp_path, 1, [made()], scored([made()], [1.0]), ["7"])
    return read_step(tmp_path, 1)[0]


def forbidden(*_):
    raise AssertionError("equal trajectories need no teacher forcing")


def again(row, new: RolloutRecord, force=forbidden):
    return replay(row, lambda _: new, force, lambda ids: " ".join(map(str, ids)))


def test_an_equal_trajectory_is_bit_exact_whatever_the_tool_took(row):
    result = again(row, made(wall_s=9.0))
    assert result.equal
    assert result.lines == [
        "bit-exact: 5 tokens, 2 of them sampled, 2 turns; ids, log-probs and tool results are equal"
    ]


def test_other_log_probs_with_the_same_ids_are_said(row):
    new = dataclasses.replace(made(), logprobs=(0.0, 0.0, -0.25, 0.0, -0.75))
    assert again(row, new).equal
    assert "log-probs differ by at most 0.25" in again(row, new).lines[0]


def test_the_first_differing_draw_is_shown_with_its_margin(row):
    new = dataclasses.replace(made(), token_ids=(10, 11, 99, 13, 14))
    asked = []

    def force(_, places):
        asked.append(list(places))
        return Draws([99, 14], [0.03, 0.0], [-0.35, -0.5])

    result = again(row, new, force)
    assert not result.equal and asked == [[2, 4]]
    assert result.lines[1] == "token 2 (sampled) was '12', now '99'; 2 tokens before it are equal"
    assert "1 of 2 draws differ; log-probs differ by at most 0.1" in result.lines[2]
    assert "token 2, recorded '12', now '99', margin 0.03" in result.lines[3]


def test_a_tool_that_answers_otherwise_is_named(row):
    new = dataclasses.replace(made(text="8"), token_ids=(10, 11, 12, 77, 14))
    result = again(row, new, lambda *_: Draws([12, 14], [0.0, 0.0], [-0.25, -0.5]))
    assert result.lines[1] == "turn 1: the same call of python gave ok '7', now ok '8'"
    assert result.lines[2] == "token 3 (appended) was '13', now '77'; 3 tokens before it are equal"
    assert "0 of 2 draws differ" in result.lines[3] and len(result.lines) == 4


def test_a_trajectory_that_goes_on_longer_differs_at_its_end(row):
    longer = record("PPAOAA")
    result = again(row, longer, lambda *_: Draws([12, 14], [0.0, 0.0], [-0.25, -0.5]))
    assert "token 5 (sampled) was the end, now '15'" in result.lines[-2]


def test_a_sample_outside_the_step_is_refused(row, tmp_path):
    assert pick(tmp_path, 1, 0) == row
    for sample in (-1, 1):
        with pytest.raises(ReplayError, match=f"--sample={sample}: step 1 has samples 0 to 0"):
            pick(tmp_path, 1, sample)


def test_weights_come_from_the_model_or_the_checkpoint_before_the_step(tmp_path):
    (tmp_path / "trajectories").mkdir()
    for step in (1, 2, 3):
        write_step(tmp_path, step, [made()], [], ["7"])
    for step, complete in ((2, True), (1, False), (9, True)):
        folder = tmp_path / f"checkpoints/step_{step}"
        folder.mkdir(parents=True)
        if complete:
            (folder / "state.json").write_text("{}")
    model = ModelConfig(path="models/m", random_weights=True)
    assert weights_before(model, tmp_path, 0) == (model, None)
    later, adapters = weights_before(model, tmp_path, 2)
    assert (later.path, later.random_weights, adapters) == (str(tmp_path / "checkpoints/step_2"), False, None)
    with pytest.raises(ReplayError, match="no such checkpoint; can be replayed: 1, 3 "):
        weights_before(model, tmp_path, 1)
    (tmp_path / "checkpoints/step_2/adapter_config.json").write_text("{}")
    assert weights_before(model, tmp_path, 2) == (model, tmp_path / "checkpoints/step_2"), "adapters on the run's base"
