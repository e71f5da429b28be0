"""The user's own tools from the config to the run folder: a whole run with one that misbehaves, refusals, records."""

import json

import pytest

from config import ConfigError, load_config, parse_config
from main import main
from run.trajectories import calls_of, read_step
from tests.support.runs import ROOT

TASK = """
import os, sys, threading, time
COUNT = 0
def calc(expression: str) -> str:
    \"\"\"Computes a sum of whole numbers.

    Example: {"expression": "2+3"}

    Args:
        expression: Numbers with +, - and *.
    \"\"\"
    if expression == "2+3":
        return "5"
    what = sum(map(ord, expression)) % 12
    if what == 0: os._exit(3)
    if what == 1: os.kill(os.getpid(), 9)
    if what == 2: raise SystemExit("left")
    if what == 3: raise ValueError("on purpose")
    if what == 4: return "x" * 10**6
    if what == 5: print("to stdout"); sys.stdin.close()
    if what == 6: threading.Thread(target=time.sleep, args=(60,)).start()
    if what == 7: threading.Timer(.02, os._exit, (1,)).start()
    if what == 8: return lambda: 1
    if what == 9: return "\\ud800"
    if what == 10: raise KeyboardInterrupt
    if what == 11 and len(expression) % 2: time.sleep(60)
    return str(eval(expression))
"""


@pytest.fixture
def folder(tmp_path):
    """A config in a folder of its own, with its task beside it."""
    (tmp_path / "task").mkdir()
    (tmp_path / "task/my_task.py").write_text(TASK)
    raw = json.loads((ROOT / "configs/tiny_cpu.json").read_text())
    raw["model"] |= {"path": str(ROOT / "models/tiny_qwen3"), "tokenizer_path": str(ROOT / "tasks/tiny_calc")}
    raw["data"]["path"] = str(ROOT / raw["data"]["path"])
    raw["rollout"] |= {"trajectories_per_step": 16}
    raw["tool"] = {"enabled": False, "functions": ["my_task.py:calc"], "timeout_seconds": 0.3}
    raw["train"] |= {"steps": 1, "check": False}
    (tmp_path / "task/cfg.json").write_text(json.dumps(raw))
    return tmp_path


def test_a_run_with_a_tool_that_misbehaves_goes_on_and_keeps_name_arguments_and_file(folder, capsys):
    config, run = str(folder / "task/cfg.json"), folder / "run"
    assert main(["--config", config, "--run-dir", str(run)]) == 0
    rows = read_step(run, 1)
    calls = list(calls_of(rows))
    assert {call["name"] for call in calls} == {"calc"} and all("expression" in call["arguments"] for call in calls)
    assert {"ok", "error"} <= {call["status"] for call in calls}
    assert not [row for row in rows if row["stop"] == "tool_infra"] and rows[0]["problem"]["prompt"]
    assert (run / "code/my_task.py").read_text() == TASK
    capsys.readouterr()
    (folder / "task/my_task.py").write_text(TASK + "#")
    assert main(["--config", config, "--run-dir", str(run), "--resume", "--set", "train.steps=2"]) == 2
    assert "tool.accept_changed_code=False" in capsys.readouterr().err


def test_check_shows_each_tool_its_cost_and_its_example(folder, capsys):
    config = str(folder / "task/cfg.json")
    main(["check", "--config", config])
    [line, cost] = [one for one in capsys.readouterr().out.splitlines() if "calc" in one and "prompt  " not in one][:2]
    assert line.startswith("ok    tool") and "Example" not in line and '"name": "calc"' in line
    assert 'calc({"expression": "2+3"}) gave ok \'5\'' in cost


@pytest.mark.parametrize(
    ("specs", "words"),
    [
        (["no_such.py:calc"], "no_such.py is neither in"),
        (["my_task.py:nothing"], "my_task.py:nothing: no such function or class; the file has calc"),
        (["my_task.py:calc", "my_task.py:calc"], "is there twice"),
        (["my_task.py"], "is no FILE.py:NAME"),
    ],
)
def test_a_spec_that_cannot_be_used_is_one_line_and_writes_nothing(folder, capsys, specs, words):
    override = f"tool.functions={json.dumps(specs)}"
    config, run = str(folder / "task/cfg.json"), folder / "run"
    assert main(["--config", config, "--run-dir", str(run), "--set", override]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert words in line and not run.exists()


def test_files_are_found_beside_the_config_and_in_a_run_s_copy(folder):
    path = folder / "task/my_task.py"
    config = load_config(folder / "task/cfg.json")
    assert config.tool.functions == (f"{path}:calc",) and config.tool.offered and config.tool.has_own
    run = folder / "run"
    (run / "code").mkdir(parents=True)
    (run / "config.json").write_text(config.to_json())
    path.rename(run / "code/my_task.py")
    assert load_config(run / "config.json").tool.functions == (f"{run}/code/my_task.py:calc",)


def test_turns_need_some_tool_be_it_the_users():
    base = {"model": {"path": "m"}, "data": {"path": "d"}, "rollout": {"max_turns": 2}}
    with pytest.raises(ConfigError, match=r"rollout\.max_turns=2: without a tool"):
        parse_config(base | {"tool": {"enabled": False}})
    assert parse_config(base | {"tool": {"enabled": False, "mcp": ["server"]}}).tool.offered
