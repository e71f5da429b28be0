"""Public files become one row a problem: unwrapped, distinct, gradable, in order; what is left out is counted.

Files are read as they are: every number as written, every path and option obeyed, every broken file refused by line.
"""

from __future__ import annotations

import datetime
import decimal
import gzip
import importlib.util
import json
import os
import sys
from pathlib import Path

import datasets
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


def run(capsys, tmp_path: Path, *words: str) -> tuple[list[dict], str]:
    out = tmp_path / "out" / "problems.jsonl"
    assert prepare_data.main([*words, "--out", str(out)]) == 0
    return [json.loads(line) for line in out.read_text().splitlines()], capsys.readouterr().out


def prepared(capsys, tmp_path: Path, source: Path, *words: str) -> tuple[dict[str, str], str]:
    """Answers by prompt of a file with the columns p and a, and all that was said."""
    out = tmp_path / "out.jsonl"
    words = ("dataset", "--source", str(source), "--prompt-field", "p", "--answer-field", "a", *words)
    assert prepare_data.main([*words, "--out", str(out)]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    said = capsys.readouterr()
    return {row["prompt"]: row["answer"] for row in rows}, said.out + said.err


def refused(capsys, tmp_path: Path, source: Path | str, *words: str) -> str:
    """The one line of a source that is refused with status 2 and without a file."""
    out = tmp_path / "refused.jsonl"
    fields = ("--prompt-field", "p", "--answer-field", "a")
    assert prepare_data.main(["dataset", "--source", str(source), *fields, "--out", str(out), *words]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("error: ") and said.err.count("\n") == 1
    assert not out.exists()
    return said.err


def file(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def pairs(*rows: tuple[str, object]) -> str:
    return "".join(json.dumps({"p": prompt, "a": answer}) + "\n" for prompt, answer in rows)


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


# Numbers and text arrive as they are written.


@pytest.mark.parametrize("written", [str(3**50), "9007199254740993", "-0.10000000000000000000000001", "1.0", "1.50"])
@pytest.mark.parametrize("kind", ["json", "jsonl", "csv", "tsv"])
def test_every_digit_of_a_number_is_kept(capsys, tmp_path, kind, written):
    rows = f'{{"p": "x", "a": {written}}}\n' if "json" in kind else f"p,a\nx,{written}\nempty,\n"
    path = file(tmp_path / f"n.{kind}", rows.replace(",", "\t") if kind == "tsv" else rows)
    assert prepared(capsys, tmp_path, path)[0] == {"x": written}


def test_an_exponent_is_spelled_out_and_one_too_large_is_left_out(capsys, tmp_path):
    rows = ("1.5e3", "25E-4", "-1e2", "1e999999999", "-1e-999999999", "NaN", "-Infinity")
    lines = "".join(f'{{"p": "{row}", "a": {row}}}\n' for row in rows)
    got, said = prepared(capsys, tmp_path, file(tmp_path / "e.jsonl", lines))
    assert got == {"1.5e3": "1500", "25E-4": "0.0025", "-1e2": "-100"}
    assert (
        "2 left out, answer has more than 1000 digits before or after the point; the first: line 4, '1e999999999'"
        in said
    )
    assert "2 left out, answer must be a non-empty string or a finite number; the first: line 6" in said


def test_numbers_of_parquet_keep_their_digits_or_are_left_out(capsys, tmp_path):
    columns = {
        "int": pyarrow.array([2**63 - 1]), "single": pyarrow.array([0.1], pyarrow.float32()),
        "double": pyarrow.array([0.1]), "decimal": pyarrow.array([decimal.Decimal("12345678901234567890.10")]),
    }  # fmt: skip
    answers = {"int": "9223372036854775807", "single": "0.1", "double": "0.1", "decimal": "12345678901234567890.10"}
    for name, column in columns.items():
        path = tmp_path / f"{name}.PARQUET"
        pyarrow.parquet.write_table(pyarrow.table({"p": ["x"], "a": column}), path)
        assert prepared(capsys, tmp_path, path)[0] == {"x": answers[name]}
    rows = [{"p": "rounded", "a": 9007199254740992.0}, {"p": "none", "a": None}, {"p": "kept", "a": 34.0}]
    got, said = prepared(capsys, tmp_path, parquet(tmp_path, rows))
    assert got == {"kept": "34.0"}
    assert "1 left out, answer is a float of 2^53 or more, which may have lost digits; store integers or text" in said


@pytest.mark.parametrize("text", ["2024-01-01", "12:30", "true", "007", "1/2", "+5"])
def test_text_that_looks_like_something_else_stays_text(capsys, tmp_path, text):
    assert prepared(capsys, tmp_path, file(tmp_path / "d.jsonl", pairs(("x", text))))[0] == {"x": text}
    assert prepared(capsys, tmp_path, file(tmp_path / "d.csv", f"p,a\nx,{text}\n"))[0] == {"x": text}


def test_quoted_cells_hold_delimiters_quotes_and_lines(capsys, tmp_path):
    path = file(tmp_path / "q.csv", '\ufeffp,a\r\n"a, ""b""\nc",7\r\n\r\n' + f"{'long ' * 40_000},8\r\n")
    assert next(iter(prepared(capsys, tmp_path, path)[0].items())) == ('a, "b"\nc', "7")


# What a path holds now is read, whatever its name; options are obeyed or refused.


def test_a_replaced_file_of_the_same_name_and_time_is_read_again(capsys, tmp_path):
    for name, old, new in (
        ("a.jsonl", pairs(("old", 1)), pairs(("new", 2))),
        ("a.csv", "p,a\nold,1\n", "p,a\nnew,2\n"),
    ):
        for content, prompt in ((old, "old"), (new, "new")):
            path = file(tmp_path / name, content)
            os.utime(path, (1, 1))
            assert list(prepared(capsys, tmp_path, path)[0]) == [prompt]
    for prompt in ("old", "new"):
        path = parquet(tmp_path, [{"p": prompt, "a": 1}])
        os.utime(path, (1, 1))
        assert list(prepared(capsys, tmp_path, path)[0]) == [prompt]


@pytest.mark.parametrize(
    "folder", ["[math] v2", "data::x", "a*b?", "{c}", "ü n", "https:", "train[:1]", os.fsdecode(b"\xff")]
)
def test_odd_characters_in_a_path_are_only_characters(capsys, tmp_path, folder):
    path = file(tmp_path / folder / "z[1].jsonl", pairs(("x", 1)))
    assert prepared(capsys, tmp_path, path)[0] == {"x": "1"}
    assert prepared(capsys, tmp_path, path.parent)[0] == {"x": "1"}
    rows = parquet(tmp_path, [{"p": "y", "a": 2}]).rename(path.parent / "z[1].parquet")
    assert prepared(capsys, tmp_path, rows)[0] == {"y": "2"}


@pytest.mark.parametrize("name", ["g.CSV", "h.tsv", "z.jsonl.gz", "Z.JSON.GZ", "t.Tsv.gz", "named.jsonl", "n.ndjson"])
def test_the_suffix_in_any_case_and_gz_are_read(capsys, tmp_path, name):
    table = "p\ta\nx\t1\n" if "tsv" in name.lower() else "p,a\nx,1\n"
    content = pairs(("x", 1)) if "js" in name.lower() else table
    packed = "gz" in name.lower() or name == "named.jsonl"  # the content says whether it is packed
    path = file(tmp_path / name, gzip.compress(content.encode()) if packed else content)
    assert prepared(capsys, tmp_path, path)[0] == {"x": "1"}


@pytest.mark.parametrize(
    "text", ['[{"p": "x", "a": 1},\n {"p": "y", "a": 2}]', '{\n"p": "x", "a": 1}\n{"p": "y", "a": 2}']
)
def test_a_json_document_is_a_list_or_objects(capsys, tmp_path, text):
    assert prepared(capsys, tmp_path, file(tmp_path / "d.json", text))[0] == {"x": "1", "y": "2"}


def test_a_split_of_a_folder_is_read_by_the_names_of_its_files(capsys, tmp_path):
    folder = tmp_path / "set"
    for name in ("train-00000-of-00002", "train-00001-of-00002", "test", "extra-00000-of-00001"):
        file(folder / "main" / f"{name}.jsonl", pairs((name[:11], 1)))
    file(folder / "dataset_infos.json", "{}")
    file(folder / ".git" / "x.jsonl", "broken")
    assert list(prepared(capsys, tmp_path, folder)[0]) == ["train-00000", "train-00001"]
    assert list(prepared(capsys, tmp_path, folder, "--split", "test")[0]) == ["test"]
    assert list(prepared(capsys, tmp_path, folder, "--subset", "main", "--split", "extra")[0]) == ["extra-00000"]
    assert "has no file of it (has extra, test, train)" in refused(capsys, tmp_path, folder, "--split", "dev")
    assert "no folder of this name" in refused(capsys, tmp_path, folder, "--subset", "hard")
    file(folder / "train.csv", "p,a\nx,1\n")
    assert "holds .csv and .jsonl files" in refused(capsys, tmp_path, folder)


def test_a_dataset_of_the_hub_is_read_as_it_is_asked_for(capsys, tmp_path, monkeypatch):
    asked = []

    def load_dataset(*words, **options):
        asked.append((*words, options["split"]))
        return datasets.Dataset.from_list([{"p": "x", "a": 9007199254740993, "other": 0.5}] * 3)

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    words = ("--subset", "main", "--split", "test[:3]")
    assert prepared(capsys, tmp_path, Path("organisation/name"), *words)[0] == {"x": "9007199254740993"}
    assert asked == [("organisation/name", "main", "test[:3]")]

    def fail(*words, **options):
        raise RuntimeError("no scripts\nany more")

    monkeypatch.setattr("datasets.load_dataset", fail)
    assert "organisation/name: cannot be loaded: no scripts; download it" in refused(
        capsys, tmp_path, "organisation/name"
    )


def test_options_without_an_effect_are_refused(capsys, tmp_path):
    path = file(tmp_path / "mine.jsonl", pairs(("x", 1)))
    assert "--split test: " in refused(capsys, tmp_path, path, "--split", "test")
    assert "--split train[:1]: " in refused(capsys, tmp_path, path, "--split", "train[:1]")
    assert prepared(capsys, tmp_path, path, "--split", "train")[0] == {"x": "1"}
    assert prepared(capsys, tmp_path, path.rename(tmp_path / "my_test.jsonl"), "--split", "test")[0] == {"x": "1"}
    path = file(tmp_path / "mine.jsonl", pairs(("x", 1)))
    assert "--subset main: " in refused(capsys, tmp_path, path, "--subset", "main")
    for words in (("--task", "chain_sum"), ("--count", "5"), ("--seed", "0")):
        assert f"{words[0]}: has no effect on dataset" in refused(capsys, tmp_path, path, *words)
    assert prepare_data.main(["reasoning-gym", "--task", "chain_sum", "--split", "test"]) == 2
    assert "--split: has no effect on reasoning-gym" in capsys.readouterr().err
    assert prepare_data.main(["reasoning-gym", "--task", "chain_sum", "--count", "-1"]) == 2
    assert "--count -1: must be at least 1" in capsys.readouterr().err


# Answers: equal ones are one, doubtful ones are shown, each cause has its first example.


def test_equal_answers_in_two_spellings_are_not_contradictory(capsys, tmp_path):
    spellings = [
        ("073", "73"),
        ("0.5", "1/2"),
        ("$7$", "7"),
        ("1,000", "1000"),
        ("\\frac12", ".5"),
        ("\\text{a}", "a"),
    ]
    rows = [(str(index), text) for index, both in enumerate(spellings) for text in both]
    got, said = prepared(capsys, tmp_path, file(tmp_path / "s.jsonl", pairs(*rows, ("torn", "7"), ("torn", "8"))))
    assert list(got.values()) == [first for first, _ in spellings]
    assert "left out: 1 prompts with contradictory answers" in said
    assert "the first: 'torn': '7' in line 13, '8' in line 14" in said


def test_every_cause_of_what_is_left_out_has_its_first_example(capsys, tmp_path):
    turns = [{"role": "user", "content": "x"}] * 2
    rows = [(" ", 1), (turns, 1), ("\ud800", 1), ("b", "\\boxed{7}"), ("c", ""), ("d", [7]), ("e", [8]), ("kept", 9)]
    got, said = prepared(capsys, tmp_path, file(tmp_path / "c.jsonl", pairs(*rows)))
    assert got == {"kept": "9"} and "1 distinct problems of 8 rows" in said
    for cause in (
        "1 left out, prompt must be text; the first: line 1, ' '",
        "1 left out, prompt needs one user turn; the first: line 2",
        "1 left out, prompt holds half of a surrogate pair; write whole characters; the first: line 3",
        "1 left out, answer does not match itself inside \\boxed{}; store the bare value; the first: line 4, '",
        "1 left out, answer is empty; every problem needs a reference; the first: line 5",
        "2 left out, answer must be a non-empty string or a finite number; the first: line 6, ['7']",
    ):
        assert cause in said


def test_references_that_hardly_any_response_matches_are_counted_and_the_first_is_shown(capsys, tmp_path):
    rows = [("x", "1"), ("y", "3+4=7\n#### 7"), ("z", "\uff17")]
    _, said = prepared(capsys, tmp_path, file(tmp_path / "w.jsonl", pairs(*rows)))
    assert (
        "warning: hardly any response can match 2 references; the first: line 2, '3+4=7\\n#### 7': a rationale" in said
    )


# Broken files and places are one line with file and line.


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("e.jsonl", b"", "line 1: the file is empty"),
        ("e.csv", b"\n \n", "line 1: the file is empty"),
        ("h.csv", b"p,a\n", "holds no row"),
        ("l.json", b"[]", "holds no row"),
        ("c.jsonl", pairs(("x", 1)).encode() + b'{"p": "y", "a', "line 2: not JSON, or cut"),
        ("b.jsonl", b'{"p": "x"\n{"p": "y", "a": 1}\n', "line 1: not JSON, or cut"),
        ("c.json", b'[{"p": "x", "a": 1},\n{"p": "y",', "line 2: not JSON, or cut"),
        ("d.json", b"[" * 100_000, "line 1: not JSON, or cut (too deep)"),
        ("o.jsonl", pairs(("x", 1)).encode() + b"\n7\n", "line 3: '7' is not an object"),
        ("u.jsonl", pairs(("x", 1)).encode("utf-16"), "line 1: UTF-16"),
        ("v.jsonl", pairs(("x", 1)).encode("utf-16-le"), "line 1: UTF-16"),
        ("w.csv", "p,a\nx,1\n".encode("utf-16-be"), "line 1: UTF-16"),
        ("l.csv", "p,a\nx,1\né,2\n".encode("latin-1"), "line 3: not UTF-8 (byte 0xe9"),
        ("k.jsonl", '{"p": "ü'.encode()[:-1], "line 1: not UTF-8"),
        ("q.csv", b'p,a\nx,1\n"y', "line 3: not ','-separated, or cut"),
        ("s.tsv", b"p\ta\nx\t1\ny", "line 3: 1 cells below 2 names"),
        ("t.csv", b"p,a\nx, y,1\n", "line 2: 3 cells below 2 names"),
        ("d.csv", b"p,a,a\nx,1,2\n", "2 columns are named 'a'"),
        ("n.csv", b"p;a\nx;1\n", "no column 'a' (has p;a)"),
        ("n.jsonl", b'{"p": "x"}\n{"b": 1}\n', "no column 'a' (has p, b)"),
        ("z.jsonl.gz", gzip.compress(b"".join(b'{"p": "%d"}\n' % i for i in range(50_000)))[:50_000], "the gzip data"),
        ("z.parquet", b"", "cannot be loaded"),
        ("x.parquet", b"PAR1" + b"x" * 99, "cannot be loaded"),
        ("x.xlsx", b"x", "its name must end in .json, .jsonl"),
    ],
)
def test_a_broken_file_is_one_line_that_names_file_and_line(capsys, tmp_path, name, content, message):
    said = refused(capsys, tmp_path, file(tmp_path / name, content))
    assert message in said and name in said


def test_a_parquet_file_of_dates_and_a_missing_source_are_one_line(capsys, tmp_path, monkeypatch):
    said = refused(capsys, tmp_path, parquet(tmp_path, [{"p": "x", "a": datetime.date(2024, 1, 1)}]))
    assert "none of 1 rows can be used" in said and "datetime.date(2024, 1, 1)" in said
    for name in ("no/such.jsonl", "no such", "a/b/c", "x::y"):
        assert "no such file or folder, nor a hub name" in refused(capsys, tmp_path, name)
    assert "too long" in refused(capsys, tmp_path, tmp_path / ("x" * 300))
    (tmp_path / "empty").mkdir()
    assert "holds no .json" in refused(capsys, tmp_path, tmp_path / "empty")


def test_an_output_that_cannot_be_written_is_one_line_before_anything_is_read(capsys, tmp_path, monkeypatch):
    source = file(tmp_path / "x.jsonl", pairs(("x", 1)))
    monkeypatch.setattr(prepare_data, "read_rows", None)
    for out in (tmp_path, source / "y.jsonl", Path("/proc/y.jsonl")):
        assert "cannot be written" in refused(capsys, tmp_path, source, "--out", str(out))
    assert "is the source itself" in refused(capsys, tmp_path, source, "--out", str(source))
