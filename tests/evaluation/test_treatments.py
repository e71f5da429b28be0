"""One checkpoint with the tool on, off and broken: what is offered, what is paired, what is chosen."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import shutil
from pathlib import Path

import pytest

import main as program
from config import ConfigError, load_config, parse_config
from data import Problem
from evaluation import treatments
from evaluation.grading import BoxGrader
from evaluation.treatments import BrokenTool, Treatment, choose_checkpoint, is_truncated, run_treatments, treated
from policy import init_distributed
from rollout.records import StopReason
from run.checkpoint import CheckpointError
from run.files import WriteError
from run.ranks import Ranks
from run.tensorfiles import checksum
from startup import building
from tests.support.builders import record
from tests.support.launch import SMALL
from tests.support.policies import CPU

ROOT = Path(__file__).parents[2]
needs_peft = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")
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
    result = BrokenTool().open({}).call("python", {"code": "print(1)"}, 3).result(timeout=0)
    assert result.status == "error" and "could not be started" in result.text


def test_only_problems_that_fit_under_every_treatment_are_sampled():
    init_distributed(CPU)
    problems = [Problem("a", "1", 1), Problem("b", "2", 2), Problem("c", "3", 3)]
    asked = {}

    def decode(ids):
        return "\\boxed{3}"

    def treatment(name: str, kept: list[Problem]) -> Treatment:
        def sample(prompts, step, take, sampling, rows):
            asked[name] = (prompts, step, sampling.n_samples_per_prompt)
            pairs = [(p, s) for p in range(len(prompts)) for s in range(2)]
            return [dataclasses.replace(record("PA", prompt=p, sample=s), stop=StopReason.ANSWERED) for p, s in pairs]

        return Treatment(CONFIG, kept, [[p.line] for p in kept], sample, decode, BoxGrader(decode))

    found = run_treatments({"on": treatment("on", problems[1:]), "off": treatment("off", problems)}, 5, Ranks())
    assert asked == {"on": ([[2], [3]], 5, 2), "off": ([[2], [3]], 5, 2)}
    assert [row["line"] for row in found["problems"]] == [2, 3]
    assert found["scores"]["on"]["avg"]["value"] == found["scores"]["off"]["avg"]["value"] == 0.5


@pytest.fixture
def run_folder(tmp_path):
    folder = tmp_path / "run/checkpoints/step_3"
    folder.mkdir(parents=True)
    (folder / "state.json").write_text(json.dumps({"step": 3, "world_size": 1}))
    (folder / "checksums_rank_0.json").write_text("{}")
    (folder / "config.json").write_text("{}")
    (tmp_path / "run/config.json").write_text(CONFIG.to_json())
    return tmp_path / "run"


def test_a_run_gives_its_newest_checkpoint_its_config_and_its_step(run_folder):
    chosen = choose_checkpoint(None, [], None, str(run_folder), None)
    assert chosen.config.model.path == str(run_folder / "checkpoints/step_3")
    assert (chosen.config.eval, chosen.adapters, chosen.step) == (CONFIG.eval, None, 3)
    assert chosen.out == run_folder / "evaluations/step_3_tools.json"


def test_a_checkpoint_and_overrides_may_be_named(run_folder):
    path = str(ROOT / "configs/tiny_cpu.json")
    folder = str(run_folder / "checkpoints/step_3")
    chosen = choose_checkpoint(path, ["eval.path=x.jsonl"], folder, None, "o.json")
    assert (chosen.config.model.path, chosen.config.eval.path) == (folder, "x.jsonl")
    assert (chosen.step, chosen.out) == (3, Path("o.json"))
    chosen = choose_checkpoint(path, ["eval.path=x.jsonl"], None, None, None)
    assert (chosen.config.model, chosen.step) == (load_config(path).model, 0)
    assert chosen.out == Path("runs/evaluation.json")


def test_a_newer_checkpoint_that_cannot_be_read_is_not_passed_over(run_folder):
    shutil.copytree(run_folder / "checkpoints/step_3", run_folder / "checkpoints/step_4")
    (run_folder / "checkpoints/step_4/state.json").write_text("z")
    with pytest.raises(CheckpointError, match=r"step_4/state\.json: is missing or differs .*step_3 is older"):
        choose_checkpoint(None, [], None, str(run_folder), None)


@pytest.mark.parametrize("name", ["config.json", "state.json"])
def test_a_damaged_checkpoint_is_refused_however_it_is_named(run_folder, name):
    folder, config = run_folder / "checkpoints/step_3", str(ROOT / "configs/tiny_cpu.json")
    sums = {"config.json": checksum(folder / "config.json"), "engine/not_read.pt": "and not there"}
    (folder / "checksums_rank_0.json").write_text(json.dumps(sums))
    choose_checkpoint(None, [], None, str(run_folder), None)
    (folder / name).write_text("z")
    problems, base = "eval.path=x.jsonl", f"model.path={folder}"
    for words in (
        (None, [], None, str(run_folder), None), (config, [problems], str(folder), None, None),
        (config, [problems, base], None, None, None),
    ):  # fmt: skip
        with pytest.raises(CheckpointError, match=rf"step_3/{name}: is missing or differs"):
            choose_checkpoint(*words)


def test_adapters_sit_on_the_base_that_they_name_unless_the_command_names_one(run_folder):
    folder = run_folder / "checkpoints/step_3"
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "base"}')
    (folder / "tokenizer_config.json").write_text("{}")
    path, problems = str(ROOT / "configs/tiny_cpu.json"), "eval.path=x.jsonl"
    of_run = choose_checkpoint(None, ["model.random_weights=true"], None, str(run_folder), None)
    named = choose_checkpoint(path, [problems], str(folder), None, None)
    moved = choose_checkpoint(path, [problems, "model.path=new/place"], str(folder), None, None)
    assert [chosen.config.model.path for chosen in (of_run, named, moved)] == ["base", "base", "new/place"]
    for chosen in (of_run, named, moved):
        assert (chosen.adapters, chosen.step, chosen.config.model.tokenizer_path) == (folder, 3, str(folder))
    assert of_run.config.model.random_weights, "as the run had it"
    (folder / "adapter_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"adapters='.*step_3': adapter_config.json cannot be read"):
        choose_checkpoint(None, [], None, str(run_folder), None)


CHANGED = [
    "train.steps=1",
    "train.learning_rate=0.02",
    "train.check=false",
    "eval.every=1",
    "eval.samples_per_prompt=4",
]


@pytest.mark.parametrize("config", ["tiny_cpu", "tiny_gpt_oss_cpu"])
@pytest.mark.parametrize("rank", [0, pytest.param(4, marks=needs_peft)])
def test_a_runs_newest_checkpoint_scores_as_it_scored_inside_the_run(monkeypatch, tmp_path, config, rank):
    monkeypatch.chdir(ROOT)
    lines = (ROOT / "models/tiny_qwen3/problems_heldout.jsonl").read_text().splitlines()[:8]
    (tmp_path / "problems.jsonl").write_text("\n".join(lines))
    settings = [*SMALL, *CHANGED, f"eval.path={tmp_path}/problems.jsonl", f"lora.rank={rank}"]
    run = tmp_path / "run"
    assert program.main(["--config", f"configs/{config}.json", "--run-dir", str(run), "--set", *settings]) == 0
    assert program.main(["evaluate", "--run-dir", str(run)]) == 0
    inside, after = (json.loads((run / f"evaluations/step_1{name}.json").read_text()) for name in ("", "_tools"))
    assert inside["scores"] == after["scores"] and inside["problems"] == after["problems"]
    folder, base = str(run / "checkpoints/step_1"), load_config(f"configs/{config}.json").model.path
    named = {"model": base, "adapters": folder} if rank else {"model": folder}
    assert inside["settings"] | named == after["settings"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((None, [], None, None, None), "name a config"),
        (("configs/tiny_cpu.json", [], None, None, None), "eval.path=''"),
        (("configs/tiny_cpu.json", [], None, "no/such/run", None), "no complete checkpoint"),
        (("configs/tiny_cpu.json", [], "no/such", None, None), "--checkpoint='no/such': is no folder of a model"),
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
    assert "scores of models/tiny_qwen3\n" in said and "replaces" not in said
    assert "25 rows hold 24 distinct prompts (the commonest 2 times)" in said and "each counts once" in said
    found = json.loads(out.read_text())
    scores = {name: score["avg"] for name, score in found["scores"].items()}
    assert scores["on"]["low"] > max(scores["off"]["value"], scores["broken"]["value"])
    assert found["scores"]["off"]["calls"] == 0 and found["scores"]["broken"]["call_errors"] == 1.0
    assert found["differences"]["on - off"]["avg"]["significant"]
    assert found["differences"]["on - broken"]["avg"]["significant"]
    assert len(found["problems"]) == 24 and set(found["problems"][0]) >= {"on", "off", "broken"}


EVALUATE = ["evaluate", "--config", "configs/tiny_cpu.json", "--set", "eval.samples_per_prompt=1"]


def small(tmp_path: Path) -> str:
    lines = (ROOT / "models/tiny_qwen3/problems_heldout.jsonl").read_text().splitlines()[:2]
    (tmp_path / "problems.jsonl").write_text("\n".join(lines))
    return f"eval.path={tmp_path}/problems.jsonl"


def test_a_place_that_cannot_be_written_is_refused_before_anything_is_sampled(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(building, "build_samplers", lambda *parts: pytest.fail("a model was built"))
    assert program.main([*EVALUATE, small(tmp_path), "--out", str(tmp_path / "problems.jsonl/out.json")]) == 2
    said = capsys.readouterr().err
    assert "problems.jsonl/out.json: cannot be written" in said and "--out" in said and said.count("\n") == 1


def test_a_disk_that_fills_up_meanwhile_takes_the_file_and_not_the_table(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(ROOT)
    run = treatments.run_treatments

    def fill(*parts):
        (tmp_path / "out.json.partial").symlink_to("/dev/full")
        return run(*parts)

    monkeypatch.setattr(treatments, "run_treatments", fill)
    assert program.main([*EVALUATE, small(tmp_path), "--out", str(tmp_path / "out.json")]) == 2
    said = capsys.readouterr()
    assert "avg@1" in said.out and "written to" not in said.out
    assert "out.json: cannot be written (No space left" in said.err


def test_a_log_that_takes_no_table_keeps_no_result_from_its_file(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)

    def full(text: str) -> None:
        if "avg@" in text:
            raise WriteError("standard output: cannot be written")

    monkeypatch.setattr(program, "say", full)
    assert program.main([*EVALUATE, small(tmp_path), "--out", str(tmp_path / "out.json")]) == 2
    assert "scores" in json.loads((tmp_path / "out.json").read_text())


def test_a_result_that_is_replaced_is_named(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(ROOT)
    words, out = [*EVALUATE, small(tmp_path)], tmp_path / "out.json"
    assert program.main([*words, "--out", str(out)]) == 0
    assert "replaces" not in capsys.readouterr().out
    assert program.main([*words, "eval.temperature=0.5", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert f"note: this replaces the evaluation in {out}; name another file with --out to keep it\n" in said
    assert said.index("replaces") < said.index("avg@1")
