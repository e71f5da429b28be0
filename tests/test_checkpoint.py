"""A checkpoint is complete or absent, whatever interrupts its writing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import checkpoint
from checkpoint import CheckpointError


class FakePolicy:
    world_size = 1

    def __init__(self, fail_in: str = ""):
        self.fail_in, self.loaded = fail_in, None

    def save(self, folder: Path) -> None:
        (folder / "engine").mkdir()
        (folder / "engine" / "part").write_text("half")
        if self.fail_in == "engine":
            raise OSError("disk full")

    def save_pretrained(self, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        if self.fail_in == "model":
            raise OSError("disk full")

    def load(self, folder: Path) -> None:
        self.loaded = folder


def save(run_dir: Path, step: int, policy=None) -> Path:
    return checkpoint.save(run_dir, step, policy or FakePolicy(), lambda folder: None, 0, lambda: None)


def test_the_newest_complete_checkpoint_is_found_by_number_not_by_name(tmp_path):
    for step in (9, 10):
        save(tmp_path, step)
    assert checkpoint.find_latest(tmp_path) == tmp_path / "checkpoints/step_10"
    assert (tmp_path / "checkpoints/latest").read_text().strip() == "step_10"


@pytest.mark.parametrize("fail_in", ["engine", "model"])
def test_a_failure_while_saving_leaves_the_last_good_one(tmp_path, fail_in):
    save(tmp_path, 10)
    with pytest.raises(OSError, match="disk full"):
        save(tmp_path, 20, FakePolicy(fail_in))
    assert checkpoint.find_latest(tmp_path) == tmp_path / "checkpoints/step_10"
    save(tmp_path, 20)  # what the failure left is no hindrance
    assert checkpoint.find_latest(tmp_path) == tmp_path / "checkpoints/step_20"


def test_a_folder_without_its_last_file_does_not_count(tmp_path):
    save(tmp_path, 10)
    (save(tmp_path, 20) / "state.json").unlink()
    assert checkpoint.find_latest(tmp_path) == tmp_path / "checkpoints/step_10"


def test_a_partial_folder_does_not_count(tmp_path):
    folder = save(tmp_path, 10)
    folder.rename(folder.with_name("step_10.partial"))
    assert checkpoint.find_latest(tmp_path) is None


def test_loading_gives_the_step_back(tmp_path):
    policy = FakePolicy()
    assert checkpoint.load(save(tmp_path, 7), policy) == 7
    assert policy.loaded == tmp_path / "checkpoints/step_7"


def test_another_world_size_is_refused_with_the_mend(tmp_path):
    folder = save(tmp_path, 7)
    (folder / "state.json").write_text(json.dumps({"step": 7, "world_size": 2}))
    with pytest.raises(CheckpointError, match=r"written by 2 ranks, and this run has 1.*Resume on 2 ranks"):
        checkpoint.load(folder, FakePolicy())
