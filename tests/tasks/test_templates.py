"""The templates of tasks/: their tools run in worker processes, their rewards tell good from bad."""

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace as Made

import pytest

import config
import tools

ROOT = Path(__file__).parents[2]
SETTINGS = config.ToolConfig(timeout_seconds=5.0, max_running=2)


def load(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "tasks" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def trajectory(text, stop="answered", calls=()):
    return Made(final_text=text, stop=stop, turns=[Made(text="", calls=list(calls))], sampled_tokens=5)


def test_boxed_math_scores_the_last_box():
    task, row = load("boxed_math"), {"answer": "2139"}
    assert task.score(trajectory(task.gold(row)), row) == (1.0, "correct")
    assert task.score(trajectory("\\boxed{7}"), row) == (-1.0, "wrong_value")
    assert task.score(trajectory("2139"), row) == (-1.0, "no_box")
    assert task.score(trajectory("\\boxed{2139}", "turn_limit"), row) == (-1.0, "turn_limit")


def test_search_finds_and_scores_by_exact_match_and_f1(tmp_path, monkeypatch):
    corpus = [{"title": "Ada", "text": "Ada was born in London."}, {"title": "Bob", "text": "Bob lives in Ulm."}]
    (tmp_path / "c.jsonl").write_text("\n".join(json.dumps(row) for row in corpus))
    monkeypatch.setenv("CORPUS", str(tmp_path / "c.jsonl"))
    made = tools.UserTools(["search.py:search"], SETTINGS, ROOT / "tasks")
    session = made.open({})
    assert session.call("search", {"query": 'born "Ada'}, 0).result(9).text.startswith("Ada: Ada was born")
    assert session.call("search", {"query": "zebra"}, 0).result(9).text == "Nothing found."
    made.close()
    task, row = load("search"), {"answer": ["the London", "Greater London"]}
    assert task.score(trajectory("<answer>london.</answer>"), row) == (1.0, "exact")
    assert task.score(trajectory("<answer>London town</answer>"), row)[0] == pytest.approx(2 / 3)
    assert task.score(trajectory("London"), row) == (0.0, "no_answer")
    assert task.score(trajectory(task.gold(row)), row)[0] == 1.0


def test_game_keeps_its_state_and_pays_for_what_the_game_says():
    made = tools.UserTools(["game.py:Game"], SETTINGS, ROOT / "tasks")
    row = {"prompt": "Find it.", "secret": 5, "tries": 4}
    session = made.open(row)
    texts = [session.call("guess", {"number": n}, 0).result(9).text for n in (1, 9, 5, 5)]
    made.close()
    assert texts == ["The number is higher. 3 tries left.", "The number is lower. 2 tries left.",
                     "Found it with 1 tries left.", "The game is over."]  # fmt: skip
    calls = [Made(name="guess", status="ok", text=text) for text in texts]
    task = load("game")
    assert task.score(trajectory("", calls=calls), row) == (0.75, "won")
    assert task.score(trajectory("Found it!"), row) == (0.0, "no_guess")
    assert task.score(trajectory("Found it!", calls=calls[:2]), row) == (0.0, "lost")
