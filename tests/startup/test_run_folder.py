"""A run's folder: begun in once, gone on with as it was, and refused in one line where that cannot be."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.support.launch import cut_back, error_of, finished_run, metrics, run

pytestmark = pytest.mark.usefixtures("in_the_repository")


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Four steps without a break."""
    return finished_run(tmp_path_factory.mktemp("straight"))


def test_a_run_folder_is_never_overwritten(straight, capsys):
    assert run(straight) == 2
    assert "already holds a run; add --resume" in capsys.readouterr().err


def test_resume_of_a_run_that_is_not_there_or_saved_nothing_is_refused(capsys, tmp_path):
    assert "no complete checkpoint to resume from; start without --resume" in error_of(
        capsys, tmp_path / "mistyped", resume=True
    )
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    assert run(tmp_path, resume=True) == 2
    assert "start without --resume in another folder" in capsys.readouterr().err


def test_resume_of_a_run_that_ended_before_its_first_step_starts_with_it(capsys, tmp_path):
    (tmp_path / "lock").write_text("")  # what such a run leaves
    assert run(tmp_path, "train.steps=1", resume=True) == 0
    assert f"{tmp_path} holds no step yet; the run starts with the first" in capsys.readouterr().out
    assert [row["step"] for row in metrics(tmp_path)] == [1]


def test_a_resume_that_has_nothing_to_do_leaves_the_settings_of_the_run_alone(straight, tmp_path, capsys):
    shutil.copytree(straight, tmp_path / "run")
    before = [(tmp_path / "run" / name).read_bytes() for name in ("config.json", "settings.jsonl")]
    assert run(tmp_path / "run", "train.steps=2", "train.warmup_steps=0", resume=True) == 0
    assert "nothing left to do: 4 steps are done and train.steps=2" in capsys.readouterr().out
    assert [(tmp_path / "run" / name).read_bytes() for name in ("config.json", "settings.jsonl")] == before


def test_a_model_into_which_the_checkpoint_does_not_fit_is_refused_on_resume(straight, tmp_path, capsys):
    cut_back(straight, tmp_path / "run")
    assert run(tmp_path / "run", "model.path=models/tiny_gpt_oss", resume=True) == 2
    said = capsys.readouterr().err
    assert (
        "model.path='models/tiny_gpt_oss': has model_type='gpt_oss', and the checkpoints" in said
        and "\n" not in said[:-1]
    )


def test_a_run_folder_that_cannot_be_written_to_is_refused_before_anything_is_built(capsys):
    assert run(Path("/proc/nowhere")) == 2
    assert "--run-dir='/proc/nowhere': cannot be written to (" in capsys.readouterr().err


@pytest.mark.parametrize("trace", ["metrics.jsonl", "checkpoints/step_3/state.json", "trajectories/step_1.parquet"])
def test_a_folder_with_any_trace_of_a_run_is_not_written_into(tmp_path, capsys, trace):
    (tmp_path / trace).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / trace).write_text("{}")
    assert run(tmp_path) == 2
    said = capsys.readouterr().err
    # There is nothing to resume from (a state must be that of its folder), so nobody is sent there.
    assert "already holds a run without a complete checkpoint; name another folder (or delete this one)" in said
    assert "--resume" not in said


def test_a_run_folder_that_is_a_file_is_refused(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert run(tmp_path / "file") == 2
    assert "is a file; name a folder" in capsys.readouterr().err


@pytest.mark.parametrize("setting", ["model.dtype=bfloat16", "train.weight_decay=0.1", "train.offload_optimizer=true"])
def test_a_setting_that_fixes_what_a_checkpoint_holds_may_not_change(straight, tmp_path, capsys, setting):
    cut_back(straight, tmp_path / "run")
    assert run(tmp_path / "run", setting, resume=True) == 2
    message = capsys.readouterr().err
    assert setting.split("=")[0] in message and "fixes what its checkpoints hold" in message


def test_a_run_from_before_a_setting_is_resumed_as_if_it_had_its_default(straight, tmp_path, capsys):
    cut_back(straight, tmp_path / "run")
    older = json.loads((tmp_path / "run" / "config.json").read_text())
    del older["teacher"], older["train"]["zero_stage"], older["version"]
    older["rollout"]["release_kv"] = False  # removed since, and at its old default
    (tmp_path / "run" / "config.json").write_text(json.dumps(older))
    (tmp_path / "run" / "settings.jsonl").write_text(json.dumps({"first_step": 1, "config": older}) + "\n")
    assert run(tmp_path / "run", resume=True) == 0
    assert "changed from" not in capsys.readouterr().out
    assert len((tmp_path / "run" / "settings.jsonl").read_text().splitlines()) == 1  # nothing has changed
    assert run(tmp_path / "run", "train.zero_stage=1", resume=True) == 2
    assert "train.zero_stage=1: was 2" in capsys.readouterr().err


def test_a_changed_setting_is_named_on_resume(straight, tmp_path, capsys):
    cut_back(straight, tmp_path / "run")
    assert run(tmp_path / "run", "train.learning_rate=1e-5", resume=True) == 0
    assert "train.learning_rate changed from 0.0005 to 1e-05" in capsys.readouterr().out


def test_a_setting_that_fixes_the_data_cursor_may_not_change(straight, tmp_path, capsys):
    cut_back(straight, tmp_path / "run")
    assert run(tmp_path / "run", "train.seed=5", resume=True) == 2
    assert "train.seed=5: was 0 in the run to resume" in capsys.readouterr().err
