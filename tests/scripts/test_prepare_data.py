"""Public files become one row a problem: unwrapped, distinct, gradable, in order; what is left out is counted."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from config import DataConfig
from data import load_problems
from reward import grade

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("prepare_data", ROOT / "scripts" / "prepare_data.py")
assert SPEC and SPEC.loader
prepare_data = importlib.util.module_from_spec(SPEC)
sys.modules["prepare_data"] = prepare_data
SPEC.loader.exec_module(prepare_data)

PROBLEM = "Find $x$ if\n\n$2x = 68$."
WRAPPED = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    f"$Answer (without quotes) where $Answer is the answer to the problem.\n\n{PROBLEM}\n\n"
    'Remember to put your answer on its own line after "Answer:".'
)


def public_row(prompt: str, answer: str, index: int = 0) -> dict:
    """The columns of the public dapo-math-17k and aime-2024 files."""
    return {
        "data_source": "math_dapo", "prompt": [{"content": prompt, "role": "user"}], "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": str(index)},
    }  # fmt: skip


def parquet(tmp_path: Path, rows: list[dict]) -> Path:
    path = tmp_path / "source.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def run(capsys, tmp_path: Path, *words: str) -> tuple[list[dict], str]:
    out = tmp_path / "out" / "problems.jsonl"
    assert prepare_data.main([*words, "--out", str(out)]) == 0
    return [json.loads(line) for line in out.read_text().splitlines()], capsys.readouterr().out


def test_dapo_repeats_and_wrapper_are_taken_off_and_the_unique_count_is_said(capsys, tmp_path):
    rows = [public_row(WRAPPED, "34", i) for i in range(100)] + [public_row("What is 1+1?", "2")]
    got, said = run(capsys, tmp_path, "dapo-math-17k", "--source", str(parquet(tmp_path, rows)))
    assert got == [{"prompt": PROBLEM, "answer": "34"}, {"prompt": "What is 1+1?", "answer": "2"}]
    assert "2 distinct problems of 101 rows; left out: nothing else" in said


def test_aime_of_960_rows_holds_thirty_problems(capsys, tmp_path):
    wrapped = [WRAPPED.replace("68", str(number)) for number in range(30)]
    rows = [public_row(text, str(number)) for _ in range(32) for number, text in enumerate(wrapped)]
    got, said = run(capsys, tmp_path, "aime-2024", "--source", str(parquet(tmp_path, rows)))
    assert [row["answer"] for row in got] == [str(number) for number in range(30)]
    assert "30 distinct problems of 960 rows" in said


def test_gsm8k_answers_are_what_follows_the_hashes(capsys, tmp_path):
    rows = [{"question": "How many?", "answer": "5 * 250 = <<5*250=1250>>1250\n#### 1,250"}]
    got, _ = run(capsys, tmp_path, "gsm8k", "--source", str(parquet(tmp_path, rows)))
    assert got == [{"prompt": "How many?", "answer": "1,250"}]
    assert grade("\\boxed{1250}", got[0]["answer"]).correct


def test_any_dataset_is_read_by_column_names_from_json_lines(capsys, tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text("".join(json.dumps({"p": f"Q{i}", "deep": {"a": i}}) + "\n" for i in range(3)))
    words = ("dataset", "--source", str(path), "--prompt-field", "p", "--answer-field", "deep.a")
    got, _ = run(capsys, tmp_path, *words)
    assert got == [{"prompt": f"Q{i}", "answer": str(i)} for i in range(3)]


def test_rows_that_cannot_be_graded_and_contradictions_are_left_out_and_counted(capsys, tmp_path):
    rows = [public_row(*r) for r in [("a", "1"), ("b", "}{"), ("c", ""), ("d", "1"), ("d", "2"), ("", "3")]]
    got, said = run(capsys, tmp_path, "dapo-math-17k", "--source", str(parquet(tmp_path, rows)))
    assert got == [{"prompt": "a", "answer": "1"}]
    assert "2 with an answer that cannot be graded" in said
    assert "1 without a prompt" in said
    assert "1 prompts with contradictory answers" in said


def test_a_conversation_of_more_than_one_user_turn_is_no_prompt(capsys, tmp_path):
    two = public_row("x", "1") | {"prompt": [{"role": "user", "content": "x"}, {"role": "user", "content": "y"}]}
    got, said = run(capsys, tmp_path, "dapo-math-17k", "--source", str(parquet(tmp_path, [two, public_row("z", "2")])))
    assert got == [{"prompt": "z", "answer": "2"}]
    assert "1 without a prompt" in said


@pytest.mark.parametrize("text", ["What is 2?", "Solve the following math problem step by step. What is 2?"])
def test_other_prompts_stay_as_they_are(text):
    assert prepare_data.unwrap(f" {text}\n") == text


def test_what_is_written_is_what_the_loader_reads(capsys, tmp_path):
    rows = [public_row("Ünïcode \u2028 line?", "\\frac{1}{2}")]
    run(capsys, tmp_path, "dapo-math-17k", "--source", str(parquet(tmp_path, rows)))
    [problem] = load_problems(tmp_path / "out" / "problems.jsonl", DataConfig(path="unused"))
    assert (problem.prompt, problem.answer) == ("Ünïcode \u2028 line?", "\\frac{1}{2}")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["dataset"], "name --source, --prompt-field and --answer-field"),
        (["gsm8k", "--source", "no/such/file.parquet"], "cannot be loaded"),
        (["reasoning-gym"], "name the task with --task"),
    ],
)
def test_a_source_that_cannot_be_used_is_one_line_and_writes_nothing(capsys, tmp_path, monkeypatch, words, message):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    assert prepare_data.main([*words, "--out", str(tmp_path / "out.jsonl")]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1
    assert not (tmp_path / "out.jsonl").exists()


def test_a_missing_column_and_a_file_without_a_usable_row_are_refused(capsys, tmp_path):
    source = str(parquet(tmp_path, [{"question": "x", "answer": "no hashes"}]))
    assert prepare_data.main(["gsm8k", "--source", source, "--prompt-field", "problem"]) == 2
    assert "no column 'problem' (has question, answer)" in capsys.readouterr().err
    assert prepare_data.main(["gsm8k", "--source", source]) == 2
    assert "none of 1 rows can be used (1 with an answer that cannot be graded)" in capsys.readouterr().err


def test_reasoning_gym_tasks_need_no_download(capsys, tmp_path):
    pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed (requirements/math.txt)")
    words = ("reasoning-gym", "--task", "chain_sum", "--count", "20", "--seed", "3")
    got, _ = run(capsys, tmp_path, *words)
    again, _ = run(capsys, tmp_path, *words)
    assert got == again and 15 <= len(got) <= 20
    assert all(grade(f"\\boxed{{{row['answer']}}}", row["answer"]).correct for row in got)
    assert prepare_data.main(["reasoning-gym", "--task", "no_such_task"]) == 2
    assert "--task no_such_task" in capsys.readouterr().err
