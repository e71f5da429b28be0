"""A checkpoint is complete or absent, whatever interrupts its writing."""

from __future__ import annotations

import json
import os
import shutil
import threading
from pathlib import Path

import pytest

from run import checkpoint
from run.checkpoint import CheckpointError, CheckpointStore, find_latest, require_whole


class FakePolicy:
    world_size = 1

    def __init__(self):
        self.loaded: list[str] = []
        self.fail_in = ""

    def save(self, folder: Path) -> dict[str, str]:
        (folder / "engine").mkdir()
        (folder / "engine" / "zero_pp_rank_0_mp_rank_00_optim_states.pt").write_text("optimizer")
        (folder / "engine" / "random_rank_0.pt").write_text("random")
        if self.fail_in == "engine":
            raise RuntimeError("PytorchStreamWriter failed writing file data/3: file write failed\nmore")
        return {}

    def save_pretrained(self, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        if self.fail_in == "model":
            raise OSError(28, "No space left on device")

    def load(self, folder: Path) -> None:
        self.loaded.append("everything")

    def load_weights(self, folder: Path) -> None:
        self.loaded.append("weights")


def alone(item):
    return [item]


@pytest.fixture
def policy():
    return FakePolicy()


def store(run_dir: Path, policy: FakePolicy, **options) -> CheckpointStore:
    return CheckpointStore(run_dir, policy, lambda folder: None, rank=0, gather=alone, **options)


def save(run_dir: Path, policy: FakePolicy, step: int, score=None, **options) -> Path:
    s = store(run_dir, policy, **options)
    s.begin(step, {"score": score})
    folder = s.finish()
    assert folder is not None
    return folder


def steps(run_dir: Path) -> list[int]:
    return sorted(int(p.name.removeprefix("step_")) for p in (run_dir / "checkpoints").glob("step_*"))


def test_the_newest_complete_checkpoint_is_found_by_number_not_by_name(tmp_path, policy):
    for step in (9, 10):
        save(tmp_path, policy, step)
    assert find_latest(tmp_path) == tmp_path / "checkpoints/step_10"
    assert (tmp_path / "checkpoints/latest").read_text().strip() == "step_10"


def test_nothing_is_in_its_place_before_finish(tmp_path, policy):
    s = store(tmp_path, policy)
    s.begin(10, {})
    assert find_latest(tmp_path) is None
    assert not (tmp_path / "checkpoints/latest").exists()
    assert s.finish() == tmp_path / "checkpoints/step_10"
    assert s.finish() is None


@pytest.mark.parametrize("fail_in", ["engine", "model"])
def test_a_full_disk_leaves_the_last_good_one_and_says_so(tmp_path, policy, fail_in):
    save(tmp_path, policy, 10)
    policy.fail_in = fail_in
    with pytest.raises(CheckpointError, match=r"step_20 could not be written .*step_10 is the last complete") as error:
        save(tmp_path, policy, 20)
    assert "\n" not in str(error.value)
    assert find_latest(tmp_path) == tmp_path / "checkpoints/step_10"
    policy.fail_in = ""
    save(tmp_path, policy, 20)  # what the failure left is no hindrance
    assert find_latest(tmp_path) == tmp_path / "checkpoints/step_20"


def test_another_ranks_failure_is_everybodys(tmp_path, policy):
    s = CheckpointStore(tmp_path, policy, lambda f: None, rank=0, gather=lambda item: [item, "OSError: rank 1's disk"])
    with pytest.raises(CheckpointError, match="rank 1's disk"):
        s.begin(10, {})
    assert find_latest(tmp_path) is None


def test_a_folder_without_its_last_file_does_not_count(tmp_path, policy):
    save(tmp_path, policy, 10)
    (save(tmp_path, policy, 20) / "state.json").unlink()
    assert find_latest(tmp_path) == tmp_path / "checkpoints/step_10"


def test_a_partial_folder_does_not_count(tmp_path, policy):
    folder = save(tmp_path, policy, 10)
    folder.rename(folder.with_name("step_10.partial"))
    assert find_latest(tmp_path) is None


def test_the_newest_and_the_best_are_kept(tmp_path, policy):
    for step, score in ((1, 0.2), (2, 0.9), (3, None), (4, 0.5), (5, None), (6, 0.4)):
        save(tmp_path, policy, step, score, keep=2)
    assert steps(tmp_path) == [2, 5, 6]


def test_an_old_one_that_cannot_be_removed_ends_nothing_and_is_named(tmp_path, policy, monkeypatch, capsys):
    save(tmp_path, policy, 1, keep=1)
    remove = shutil.rmtree

    def busy(path, **options):
        if path.name == "step_1":
            raise OSError(16, "Device or resource busy", str(path))
        remove(path, **options)

    monkeypatch.setattr(checkpoint.shutil, "rmtree", busy)
    assert save(tmp_path, policy, 2, keep=1) == find_latest(tmp_path)
    assert "step_1 could not be removed (OSError: [Errno 16]" in capsys.readouterr().out
    monkeypatch.undo()
    save(tmp_path, policy, 3, keep=1)
    assert steps(tmp_path) == [3]


def test_what_a_killed_save_left_goes_with_the_next_one_whichever_step_that_is_of(tmp_path, policy):
    """A run that is often preempted would fill its disk: the save that a signal asked for is of a step of its own."""
    for keep, step in ((0, 1), (1, 10)):
        left = save(tmp_path, policy, step + 7).with_name(f"step_{step + 7}.partial")
        left.with_suffix("").rename(left)
        save(tmp_path, policy, step, keep=keep)
        assert not left.exists() and step in steps(tmp_path)


def test_an_old_one_whose_removal_was_killed_is_removed_by_the_next_save(tmp_path, policy):
    for step, score in ((1, 0.9), (2, 0.1), (3, 0.1)):
        save(tmp_path, policy, step, score)
    for name in ("step_2/state.json", "step_3/config.json"):  # whatever was taken first
        (tmp_path / "checkpoints" / name).unlink()
    save(tmp_path, policy, 4, 0.1, keep=1)
    assert steps(tmp_path) == [1, 4]


def test_without_a_limit_all_are_kept(tmp_path, policy):
    for step in range(1, 6):
        save(tmp_path, policy, step)
    assert steps(tmp_path) == [1, 2, 3, 4, 5]


def test_loading_gives_the_state_back(tmp_path, policy):
    folder = save(tmp_path, policy, 7, score=0.5)
    assert checkpoint.load(folder, policy, 0, alone) == {"step": 7, "world_size": 1, "score": 0.5}
    assert policy.loaded == ["everything"]


def test_another_number_of_ranks_takes_the_weights_and_says_what_stays_behind(tmp_path, policy, capsys):
    folder = save(tmp_path, policy, 7)
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps(state | {"world_size": 2}))
    sums = (folder / "checksums_rank_0.json").read_text()
    (folder / "checksums_rank_1.json").write_text(sums)
    assert checkpoint.load(folder, policy, 0, alone)["step"] == 7
    assert policy.loaded == ["weights"]
    assert "1 ranks from 2: weights and data carry over" in capsys.readouterr().out


@pytest.mark.parametrize(
    "name", ["engine/zero_pp_rank_0_mp_rank_00_optim_states.pt", "engine/random_rank_0.pt", "config.json"]
)
def test_a_damaged_file_is_named_and_nothing_is_loaded(tmp_path, policy, name):
    save(tmp_path, policy, 5)
    folder = save(tmp_path, policy, 7)
    (folder / name).write_text("other")
    with pytest.raises(CheckpointError, match=rf"{name}: is missing or differs .*step_5 is older"):
        checkpoint.load(folder, policy, 0, alone)
    assert policy.loaded == []


@pytest.mark.parametrize("name", ["config.json", "state.json", "checksums_rank_0.json"])
@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_text("z")], ids=["missing", "altered"])
def test_who_reads_only_the_model_is_refused_with_the_line_of_a_resume(tmp_path, policy, name, damage):
    save(tmp_path, policy, 5)
    folder = save(tmp_path, policy, 7)
    damage(folder / name)
    with pytest.raises(CheckpointError, match=rf"step_7/{name}: is missing or differs .*step_5 is older"):
        require_whole(folder)


def test_who_reads_only_the_model_does_not_read_the_engines_state(tmp_path, policy, monkeypatch):
    folder = save(tmp_path, policy, 7)
    read, summed = [], checkpoint.checksum
    monkeypatch.setattr(checkpoint, "checksum", lambda path: read.append(path.name) or summed(path))
    require_whole(folder)
    assert read == ["config.json"]
    shutil.rmtree(folder / "engine")
    require_whole(folder.rename(tmp_path / "a copy without it, renamed"))


def test_a_state_of_another_step_is_damage_for_who_reads_only_the_model(tmp_path, policy):
    folder = save(tmp_path, policy, 7)
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps(state | {"step": 3}))
    with pytest.raises(CheckpointError, match=r"step_7/state\.json: is missing or differs"):
        require_whole(folder)


def test_a_folder_that_is_no_runs_checkpoint_has_no_checksums_to_differ_from(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    require_whole(tmp_path)
    require_whole(tmp_path / "organisation/model")


def test_a_missing_checksum_file_is_damage_too(tmp_path, policy):
    folder = save(tmp_path, policy, 7)
    (folder / "checksums_rank_0.json").unlink()
    with pytest.raises(CheckpointError, match=r"checksums_rank_0\.json: is missing"):
        checkpoint.load(folder, policy, 0, alone)


def test_every_file_of_a_checkpoint_but_the_last_has_a_checksum(tmp_path, policy):
    folder = save(tmp_path, policy, 7)
    sums = json.loads((folder / "checksums_rank_0.json").read_text())
    files = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
    assert set(sums) == files - {"state.json", "checksums_rank_0.json"}


class LibraryError(Exception):
    """Neither an OSError nor a RuntimeError, as safetensors answers a full disk."""


def test_an_error_of_any_kind_in_the_writer_is_heard_and_deletes_nothing(tmp_path, policy):
    save(tmp_path, policy, 10, keep=1)

    def fail(folder):
        raise LibraryError("No space left on device")

    policy.save_pretrained = fail
    with pytest.raises(CheckpointError, match=r"No space left .*step_10 is the last complete"):
        save(tmp_path, policy, 20, keep=1)
    assert steps(tmp_path / "x") == [] and find_latest(tmp_path) == tmp_path / "checkpoints/step_10"


def test_a_writer_that_vanishes_is_a_failure(tmp_path, policy):
    s = store(tmp_path, policy)
    s._write = lambda: None
    s.begin(10, {})
    with pytest.raises(CheckpointError, match="did not finish"):
        s.finish()
    assert find_latest(tmp_path) is None


def test_nothing_is_committed_without_every_ranks_checksums(tmp_path, policy):
    policy.world_size = 2
    s = store(tmp_path, policy)
    s.begin(10, {})
    with pytest.raises(CheckpointError, match="rank 1 left no checksums"):
        s.finish()
    assert find_latest(tmp_path) is None


@pytest.mark.parametrize("name", ["state.json", "checksums_rank_0.json"])
def test_an_emptied_file_is_damage_not_a_crash(tmp_path, policy, name):
    save(tmp_path, policy, 5)
    folder = save(tmp_path, policy, 7)
    (folder / name).write_text("")
    if name == "state.json":
        assert find_latest(tmp_path) == tmp_path / "checkpoints/step_5"
    else:
        with pytest.raises(CheckpointError, match="is missing or differs"):
            checkpoint.load(folder, policy, 0, alone)


@pytest.mark.parametrize(
    "change", [{"step": 3}, {"world_size": 0}, {"world_size": None}, {"step": None}], ids=lambda c: str(c)
)  # fmt: skip
def test_a_state_that_is_not_its_folders_is_damage(tmp_path, policy, change):
    folder = save(tmp_path, policy, 2)
    state = json.loads((folder / "state.json").read_text()) | change
    (folder / "state.json").write_text(json.dumps({k: v for k, v in state.items() if v is not None}))
    with pytest.raises(CheckpointError, match=r"step_2/state\.json: is missing or differs"):
        checkpoint.load(folder, policy, 0, alone)
    assert policy.loaded == []


def test_a_state_of_fewer_ranks_than_left_checksums_is_damage(tmp_path, policy):
    folder = save(tmp_path, policy, 2)
    (folder / "checksums_rank_1.json").write_text("{}")  # world_size 2 with one bit turned
    with pytest.raises(CheckpointError, match=r"state\.json: is missing or differs"):
        checkpoint.load(folder, policy, 0, alone)


@pytest.mark.parametrize("text", [None, "", "{", '{"stdp": 7}', "\xff"])
def test_who_goes_on_is_told_of_a_newer_checkpoint_that_cannot_be_read(tmp_path, policy, text):
    save(tmp_path, policy, 5)
    state = save(tmp_path, policy, 7) / "state.json"
    assert checkpoint.newest(tmp_path) == tmp_path / "checkpoints/step_7"
    state.unlink() if text is None else state.write_text(text, encoding="latin-1")
    with pytest.raises(CheckpointError, match=r"step_7/state\.json: is missing .*step_5 is older"):
        checkpoint.newest(tmp_path)
    state.parent.rename(state.parent.with_name("step_7.partial"))  # as a crash leaves one: not yet a checkpoint
    assert checkpoint.newest(tmp_path) == tmp_path / "checkpoints/step_5"


def test_everything_is_on_the_disk_before_it_counts(tmp_path, policy, monkeypatch):
    synced, renamed = set(), {}
    fsync, replace = os.fsync, os.replace

    def sync(descriptor):
        synced.add(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def rename(source, target):
        renamed[Path(target).name] = (set(synced), set(Path(source).rglob("*")) | {Path(source)})
        replace(source, target)

    monkeypatch.setattr(checkpoint.os, "fsync", sync)
    monkeypatch.setattr(checkpoint.os, "replace", rename)
    save(tmp_path, policy, 7)
    done, needed = renamed["step_7"]
    assert needed <= done and len(needed) == 7  # five files, the engine's folder and the checkpoint's
    assert tmp_path / "checkpoints" in synced


def test_without_a_complete_checkpoint_nobody_is_sent_to_resume_from_it(tmp_path, policy):
    policy.fail_in = "model"
    with pytest.raises(CheckpointError, match=r"no complete one yet\. .* start anew in another folder"):
        save(tmp_path, policy, 7)


def test_the_copy_is_written_while_the_engine_is(tmp_path, policy):
    begun, save_engine, save_copy = threading.Event(), policy.save, policy.save_pretrained

    def wait_for_the_copy(folder):
        assert begun.wait(10)
        return save_engine(folder)

    policy.save = wait_for_the_copy
    policy.save_pretrained = lambda folder: (begun.set(), save_copy(folder))
    assert save(tmp_path, policy, 7) == find_latest(tmp_path)


def test_a_file_that_the_policy_summed_up_is_not_read_again(tmp_path, policy, monkeypatch):
    name, read, inner = "engine/random_rank_0.pt", [], checkpoint.checksum
    save_engine = policy.save
    policy.save = lambda folder: save_engine(folder) | {name: "as written"}
    monkeypatch.setattr(checkpoint, "checksum", lambda path: (read.append(path.name), inner(path))[1])
    folder = save(tmp_path, policy, 7)
    assert json.loads((folder / "checksums_rank_0.json").read_text())[name] == "as written"
    assert sorted(read) == ["config.json", "zero_pp_rank_0_mp_rank_00_optim_states.pt"]
    with pytest.raises(CheckpointError, match=r"random_rank_0\.pt: is missing or differs"):
        checkpoint.load(folder, policy, 0, alone)


def test_what_the_engine_still_writes_when_the_copy_is_done_is_summed_up_when_it_is_whole(
    tmp_path, policy, monkeypatch
):
    """DeepSpeed puts its recovery scripts beside the copy's files."""
    begun, copied, save_engine = threading.Event(), threading.Event(), policy.save
    save_copy, write_copy = policy.save_pretrained, CheckpointStore._write_copy

    def save_beside(folder):
        with (folder / "zero_to_fp32.py").open("w") as script:
            begun.set()
            assert copied.wait(10)
            script.write("import torch")
        return save_engine(folder)

    def mark(self):
        sums = write_copy(self)
        copied.set()
        return sums

    policy.save = save_beside
    policy.save_pretrained = lambda folder: (begun.wait(10), save_copy(folder))
    monkeypatch.setattr(CheckpointStore, "_write_copy", mark)
    checkpoint.load(save(tmp_path, policy, 7), policy, 0, alone)
    assert policy.loaded == ["everything"]
