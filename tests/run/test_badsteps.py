"""Steps that could not be trained leave their batches behind, and too many in a row end the run."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from config import UserError
from run.badsteps import BadSteps, NotFiniteError
from run.files import WriteError
from tests.support.policies import micro_batches, step
from update.measures import gap_figures
from update.update import OneUpdate, UpdateStats

GAP = gap_figures(*(torch.zeros(0, dtype=torch.float64),) * 3)
GOOD = OneUpdate(0.1, 1.0, 36, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0, GAP)
BAD_LOSS = dataclasses.replace(GOOD, loss=math.nan, grad_norm=math.inf)
BAD_GRADIENT = dataclasses.replace(GOOD, grad_norm=math.inf)


def stats(*updates: OneUpdate) -> UpdateStats:
    return UpdateStats(updates, GAP, None)


def test_the_batches_of_a_bad_update_can_be_read_again(tmp_path):
    parts = [micro_batches(step(), 30), micro_batches(step(), 50)]
    BadSteps(tmp_path, rank=1, limit=2).watch(7, parts, stats(GOOD, BAD_LOSS))
    [entry] = torch.load(tmp_path / "bad_steps/step_7_rank_1.pt", weights_only=True)
    assert entry["update"] == 1
    assert math.isnan(entry["loss"])
    assert len(entry["micro_batches"]) == len(parts[1])
    assert torch.equal(entry["micro_batches"][0]["input_ids"], parts[1][0].input_ids)
    assert entry["micro_batches"][0]["lengths"] == parts[1][0].lengths


def test_a_full_disk_is_named(tmp_path):
    (tmp_path / "bad_steps").mkdir()
    (tmp_path / "bad_steps/step_7_rank_1.pt.partial").symlink_to("/dev/full")
    with pytest.raises(WriteError, match=r"step_7_rank_1.pt: cannot be written \(No space left"):
        BadSteps(tmp_path, rank=1, limit=2).watch(7, [micro_batches(step(), 30)], stats(BAD_LOSS))


def test_a_good_step_writes_nothing(tmp_path):
    BadSteps(tmp_path, rank=0, limit=1).watch(1, [[]], stats(GOOD))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("bad", [BAD_LOSS, BAD_GRADIENT])
def test_the_last_allowed_bad_step_in_a_row_ends_the_run(tmp_path, bad):
    watch = BadSteps(tmp_path, rank=0, limit=3)
    for number in (1, 2):
        watch.watch(number, [[]], stats(bad))
        watch.check(number)
    watch.watch(3, [[]], stats(bad))
    with pytest.raises(NotFiniteError) as error:
        watch.check(3)
    message = str(error.value)
    assert isinstance(error.value, UserError) and "\n" not in message
    for words in ("step 3", "3 steps in a row", "train.max_bad_steps=3", str(tmp_path), "lower train.learning_rate"):
        assert words in message
    assert len(list((tmp_path / "bad_steps").iterdir())) == 3


def test_a_good_step_between_bad_ones_starts_the_count_again(tmp_path):
    watch = BadSteps(tmp_path, rank=0, limit=2)
    for number, one in enumerate([BAD_LOSS, GOOD, BAD_LOSS, GOOD, BAD_GRADIENT], start=1):
        watch.watch(number, [[]], stats(one))
        watch.check(number)
