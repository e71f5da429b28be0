"""The templates of tasks/: their tools run in worker processes, their rewards tell good from bad."""

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace as Made

import pytest
from transformers import AutoTokenizer
from transformers.utils import get_json_schema

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


def test_tiny_calc_pays_for_a_computed_answer_in_a_box():
    task, row = load("tiny_calc"), {"answer": "2139"}
    calls = [Made(name="calc", status="ok", text=task.calc("(0+77*27+60)"))]
    assert calls[0].text == "2139"
    with pytest.raises(ValueError, match="not a sum"):
        task.calc("x+1")
    assert task.score(trajectory("\\boxed{2139}.", calls=calls), row) == (0.95, "boxed", True)
    assert task.score(trajectory("It is 2139.", calls=calls), row) == (0.2, "no_box", False)
    assert task.score(trajectory("\\boxed{7}", calls=calls), row) == (0.0, "wrong", False)
    assert task.score(trajectory("\\boxed{2139}"), row) == (0.0, "not_computed", False)  # a guess


def test_the_tokenizer_of_tiny_calc_is_the_tiny_models_with_other_words(tmp_path):
    task, tiny = load("tiny_calc"), ROOT / "models/tiny_qwen3"
    task.write_tokenizer(tiny, tmp_path)
    for file in tmp_path.iterdir():
        assert file.read_bytes() == (ROOT / "tasks/tiny_calc" / file.name).read_bytes()
    schema = get_json_schema(task.calc)
    schema["function"].pop("return", None)
    ids = []
    for folder, tool in ((tiny, tools.tool_schema(SETTINGS)), (ROOT / "tasks/tiny_calc", schema)):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        message = [{"role": "user", "content": "What is 77*27+60?"}]
        text = tokenizer.apply_chat_template(message, tools=[tool], add_generation_prompt=True, tokenize=False)
        ids.append(tokenizer.encode(text))
    assert ids[0] == ids[1] and len(ids[0]) == 26


@pytest.mark.parametrize("path", sorted((ROOT / "configs/tasks").glob("*.json")), ids=lambda path: path.stem)
def test_each_template_has_a_config_whose_files_exist(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    made = config.load_config(path)
    for spec in (made.reward.function, *made.tool.functions):
        assert Path(spec.rpartition(":")[0]).is_file()
    rows = [json.loads(line) for line in Path(made.data.path).read_text().splitlines()]
    assert all(row["prompt"] for row in rows)
    assert sum(1 for _ in (ROOT / f"tasks/{path.stem}.py").open()) < 120


def test_the_shipped_corpus_and_rows_are_what_the_templates_write(tmp_path):
    load("search").write_corpus(tmp_path)
    load("game").write_rows(tmp_path)
    for name in ("search/corpus.jsonl", "search/questions.jsonl", "game/rows.jsonl"):
        assert (tmp_path / Path(name).name).read_bytes() == (ROOT / "tasks" / name).read_bytes()


def test_every_question_of_the_corpus_can_be_answered_by_searching():
    task = load("search")
    for row in map(json.loads, (ROOT / "tasks/search/questions.jsonl").read_text().splitlines()):
        name = row["prompt"].partition("?")[0].partition(" born")[0].split()[-2:]
        found = task.search(" ".join(name))
        town = found.partition("born in ")[2].partition(" in ")[0]
        assert row["answer"] in found or row["answer"] in task.search(town)
        assert task.score(trajectory(task.gold(row)), row) == (1.0, "exact")
