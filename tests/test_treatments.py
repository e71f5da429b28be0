"""One checkpoint with the tool on, off and broken: what is offered, what is paired, what is chosen."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

import main as program
from config import ConfigError, load_config, parse_config
from data import Problem
from evaluation.treatments import BrokenTool, Treatment, choose_checkpoint, is_truncated, run_treatments, treated
from policy import init_distributed
from rollout.records import StopReason
from runtime.ranks import Ranks
from tests.builders import record
from tests.test_policy import CPU

ROOT = Path(__file__).parent.parent
CONFIG = parse_config({
    "model": {"path": "m"}, "data": {"path": "d"}, "eval": {"path": "e.jsonl", "samples_per_prompt": 2},
})  # fmt: skip


def test_off_offers_no_tool_and_one_turn_and_changes_nothing_else():
    off = treated(CONFIG, "off")
    assert (off.tool.enabled, off.rollout.max_turns) == (False, 1)
    assert dataclasses.replace(off, tool=CONFIG.tool, rollout=CONFIG.rollout) == CONFIG
    assert treated(CONFIG, "on") == treated(CONFIG, "broken") == CONFIG


@pytest.mark.parametrize(("values", "expected"), [({}, False), ({"top_p": 0.9}, True), ({"top_k": 5}, True)])
def test_truncated_evaluations_are_told_apart_since_graphs_cannot_do_them(values, expected):
    assert is_truncated(dataclasses.replace(CONFIG, eval=dataclasses.replace(CONFIG.eval, **values))) is expected


def test_a_config_without_a_tool_has_only_off():
    without = treated(CONFIG, "off")
    with pytest.raises(ConfigError, match="evaluate with --tools off"):
        treated(without, "broken")
    assert treated(without, "off") == without


def test_a_broken_tool_answers_at_once_with_an_error():
    result = BrokenTool().submit("print(1)", seed=3).result(timeout=0)
    assert result.status == "error" and "could not be started" in result.text


def test_only_problems_that_fit_under_every_treatment_are_sampled():
    init_distributed(CPU)
    problems = [Problem("a", "1", 1), Problem("b", "2", 2), Problem("c", "3", 3)]
    asked = {}

    def treatment(name: str, kept: list[Problem]) -> Treatment:
        def sample(prompts, step, take, sampling):
            asked[name] = (prompts, step, sampling.n_samples_per_prompt)
            pairs = [(p, s) for p in range(len(prompts)) for s in range(2)]
            return [dataclasses.replace(record("PA", prompt=p, sample=s), stop=StopReason.ANSWERED) for p, s in pairs]

        return Treatment(CONFIG, kept, [[p.line] for p in kept], sample, lambda ids: "\\boxed{3}")

    found = run_treatments({"on": treatment("on", problems[1:]), "off": treatment("off", problems)}, 5, Ranks())
    assert asked == {"on": ([[2], [3]], 5, 2), "off": ([[2], [3]], 5, 2)}
    assert [row["line"] for row in found["problems"]] == [2, 3]
    assert found["scores"]["on"]["avg"]["value"] == found["scores"]["off"]["avg"]["value"] == 0.5


@pytest.fixture
def run_folder(tmp_path):
    folder = tmp_path / "run/checkpoints/step_3"
    folder.mkdir(parents=True)
    (folder / "state.json").write_text(json.dumps({"step": 3}))
    (tmp_path / "run/config.json").write_text(CONFIG.to_json())
    return tmp_path / "run"


def test_a_run_gives_its_newest_checkpoint_its_config_and_its_step(run_folder):
    config, step, out = choose_checkpoint(None, [], None, str(run_folder), None)
    assert config.model.path == str(run_folder / "checkpoints/step_3")
    assert (config.eval, step, out) == (CONFIG.eval, 3, run_folder / "evaluations/step_3_tools.json")


def test_a_checkpoint_and_overrides_may_be_named(run_folder):
    path = str(ROOT / "configs/tiny_cpu.json")
    folder = str(run_folder / "checkpoints/step_3")
    config, step, out = choose_checkpoint(path, ["eval.path=x.jsonl"], folder, None, "o.json")
    assert (config.model.path, config.eval.path, step, out) == (folder, "x.jsonl", 3, Path("o.json"))
    config, step, out = choose_checkpoint(path, ["eval.path=x.jsonl"], None, None, None)
    assert (config.model, step, out) == (load_config(path).model, 0, Path("runs/evaluation.json"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((None, [], None, None, None), "name a config"),
        (("configs/tiny_cpu.json", [], None, None, None), "eval.path=''"),
        (("configs/tiny_cpu.json", [], None, "no/such/run", None), "no complete checkpoint"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(arguments, words, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(ConfigError, match=words):
        choose_checkpoint(*arguments)


def test_the_command_scores_the_three_treatments_of_the_shipped_model(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(ROOT)
    lines = (ROOT / "models/tiny_qwen3/problems_heldout.jsonl").read_text().splitlines()[:24]
    problems = tmp_path / "problems.jsonl"
    problems.write_text("\n".join([*lines, lines[0]]))
    settings = [f"eval.path={problems}", "eval.samples_per_prompt=8", "train.seed=1"]
    sets = [word for setting in settings for word in ("--set", setting)]
    out = tmp_path / "out.json"
    words = ["evaluate", "--config", "configs/tiny_cpu.json", *sets, "--tools", "on", "off", "broken"]
    assert program.main([*words, "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "25 rows hold 24 distinct prompts (the commonest 2 times)" in said and "each counts once" in said
    found = json.loads(out.read_text())
    scores = {name: score["avg"] for name, score in found["scores"].items()}
    assert scores["on"]["low"] > max(scores["off"]["value"], scores["broken"]["value"])
    assert found["scores"]["off"]["calls"] == 0 and found["scores"]["broken"]["call_errors"] == 1.0
    assert found["differences"]["on - off"]["avg"]["significant"]
    assert found["differences"]["on - broken"]["avg"]["significant"]
    assert len(found["problems"]) == 24 and set(found["problems"][0]) >= {"on", "off", "broken"}
