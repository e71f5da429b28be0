"""Every step is looked at with the settings it was trained with, however often a run was resumed with others."""

from __future__ import annotations

import json

import pytest

import main as program
from config import parse_config
from report.page import write_report
from report.runs import read_run
from run.stretches import begin_stretch, changes, settings_of, stretches
from tests.support.launch import ROOT, run
from tests.support.runs import metrics_row, write_run


def resolved(**loss) -> str:
    return parse_config({"model": {"path": "m"}, "data": {"path": "d"}, "loss": loss}).to_json()


def policies(run_dir) -> list[tuple[int, str]]:
    return [(one.steps.start, one.config["loss"]["policy"]) for one in stretches(run_dir)]


def test_a_stretch_begins_where_settings_change_and_only_there(tmp_path):
    begin_stretch(tmp_path, 1, resolved(policy="dapo"))
    begin_stretch(tmp_path, 5, resolved(policy="dapo"))
    begin_stretch(tmp_path, 8, resolved(policy="grpo"))
    assert policies(tmp_path) == [(1, "dapo"), (8, "grpo")]
    assert [settings_of(tmp_path, step)["loss"]["policy"] for step in (1, 7, 8, 10**9)] == ["dapo"] * 2 + ["grpo"] * 2
    assert changes(tmp_path) == ['from step 8: loss.policy "dapo" -> "grpo"']
    assert json.loads((tmp_path / "config.json").read_text())["loss"]["policy"] == "grpo"


def test_a_resume_from_an_earlier_step_forgets_what_it_does_anew(tmp_path):
    for step, policy in ((1, "dapo"), (5, "grpo"), (9, "gspo")):
        begin_stretch(tmp_path, step, resolved(policy=policy))
    begin_stretch(tmp_path, 5, resolved(policy="cispo"))
    assert policies(tmp_path) == [(1, "dapo"), (5, "cispo")]
    begin_stretch(tmp_path, 1, resolved(policy="grpo"))  # a new run in the folder of one that never took a step
    assert policies(tmp_path) == [(1, "grpo")]


def test_a_run_from_before_there_was_a_history_keeps_its_settings_at_a_resume(tmp_path):
    (tmp_path / "config.json").write_text(resolved(policy="dapo"))
    assert policies(tmp_path) == [(1, "dapo")]
    begin_stretch(tmp_path, 3, resolved(policy="grpo"))
    assert policies(tmp_path) == [(1, "dapo"), (3, "grpo")]


def test_curves_and_the_report_know_the_settings_of_their_step(tmp_path):
    folder = write_run(tmp_path / "run", [metrics_row(1), metrics_row(2)])
    begin_stretch(folder, 2, (folder / "config.json").read_text().replace('"decode_rows": 128', '"decode_rows": 256'))
    before, after = read_run(folder).columns["occupancy"]
    assert before == pytest.approx(2 * after)
    write_report(folder, None, None, 10)
    assert "from step 2: rollout.decode_rows 128 -&gt; 256" in (folder / "report.html").read_text()


def test_after_a_resume_with_other_settings_every_step_is_audited_and_replayed_with_its_own(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(ROOT)
    assert run(tmp_path, "train.check=false", "train.steps=2") == 0
    changed = ("loss.policy=grpo", "reward.scale=std", "rollout.temperature=0.7", "tool.max_output_chars=100")
    assert run(tmp_path, "train.check=false", *changed, resume=True) == 0
    assert program.main(["audit", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "4 steps, 64 rewards, 4 losses" in said and "0 differ" in said
    program.main(["replay", str(tmp_path), "--step", "1", "--sample", "5"])
    assert "bit-exact" in capsys.readouterr().out
    (tmp_path / "settings.jsonl").unlink()  # the last settings alone, as it was: both must be able to fail
    assert program.main(["audit", "--no-tools", str(tmp_path)]) == 1
    program.main(["replay", str(tmp_path), "--step", "1", "--sample", "5"])
    assert "bit-exact" not in capsys.readouterr().out
