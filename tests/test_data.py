"""Problems are checked line by line; the order is a function of the step; batches hold exactly the sampled tokens."""

from __future__ import annotations

import json
from decimal import Decimal

import pytest

from config import ConfigError, DataConfig
from data import (
    DataError,
    Problem,
    ProblemStream,
    TrainingData,
    distinct,
    duplicates,
    load_problems,
    render_prompts,
    unmatchable,
)

CONFIG = DataConfig(path="unused")
GOOD = {"prompt": "What is 1+1?", "answer": "2"}


def write(tmp_path, *lines: str):
    path = tmp_path / "problems.jsonl"
    path.write_text("\n".join(lines))
    return path


def test_blank_lines_are_skipped_and_line_numbers_stay_true(tmp_path):
    problems = load_problems(write(tmp_path, json.dumps(GOOD), "", "   ", json.dumps(GOOD), ""), CONFIG)
    assert [p.line for p in problems] == [1, 4]
    assert problems[0] == Problem("What is 1+1?", "2", 1, row=GOOD)


def test_with_a_users_reward_a_row_needs_only_a_prompt_and_keeps_its_columns(tmp_path):
    rows = [{"prompt": "a", "secret": 0.1}, {"prompt": "b", "answer": ["x", 2], "n": 12345678901234567890}]
    problems = load_problems(write(tmp_path, *map(json.dumps, rows)), CONFIG, box_rule=False)
    assert [p.row for p in problems] == rows
    assert [p.answer for p in problems] == ["", '["x", 2]']
    with pytest.raises(DataError, match="'answer' is missing"):
        load_problems(write(tmp_path, json.dumps(rows[0])), CONFIG)


def test_a_prompt_may_be_a_list_of_messages(tmp_path):
    talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    [problem] = load_problems(write(tmp_path, json.dumps({"prompt": talk})), CONFIG, box_rule=False)
    assert problem.messages == tuple(talk) and problem.prompt == "system: Be brief.\nuser: Hi"
    for bad, says in [
        ([], "end with one of the user"), (talk[::-1], "end with one of the user"), ([{"role": "user"}], "write {"),
        ([{"role": "tool", "content": "x"}], "with a role of system, user, assistant"),
    ]:  # fmt: skip
        with pytest.raises(DataError, match=says):
            load_problems(write(tmp_path, json.dumps({"prompt": bad})), CONFIG, box_rule=False)


def test_the_digest_is_of_whole_rows_only_where_they_are_read(tmp_path):
    one, other = Problem("p", "1", 1, row={"a": 1}), Problem("p", "1", 1, row={"a": 2})
    assert TrainingData([one], [[1]]).digest() == TrainingData([other], [[1]]).digest()
    whole = [TrainingData([p], [[1]], whole_rows=True).digest() for p in (one, other)]
    assert whole[0] != whole[1]


def test_a_number_may_be_the_answer(tmp_path):
    assert load_problems(write(tmp_path, json.dumps(GOOD | {"answer": 16})), CONFIG)[0].answer == "16"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{broken", ["line 2", "not JSON"]),
        ("[1]", ["line 2", "a list, not an object"]),
        (json.dumps({"answer": "2"}), ["line 2", "'prompt' is missing", "data.prompt_field"]),
        (json.dumps({"prompt": "x"}), ["line 2", "'answer' is missing", "data.answer_field"]),
        (json.dumps(GOOD | {"prompt": " "}), ["line 2", "'prompt'", "non-empty"]),
        (json.dumps(GOOD | {"prompt": 3}), ["line 2", "'prompt'", "non-empty"]),
        (json.dumps(GOOD | {"answer": ""}), ["line 2", "'answer'", "is empty"]),
        (json.dumps(GOOD | {"answer": None}), ["line 2", "'answer'"]),
        (json.dumps(GOOD | {"answer": True}), ["line 2", "'answer'"]),
        (json.dumps(GOOD | {"answer": ["2"]}), ["line 2", "'answer'"]),
    ],
)
def test_a_bad_line_is_named_with_file_line_field_and_mend(tmp_path, line, words):
    path = write(tmp_path, json.dumps(GOOD), line)
    with pytest.raises(DataError) as error:
        load_problems(path, CONFIG)
    message = str(error.value)
    assert str(path) in message and "\n" not in message
    assert not [word for word in words if word not in message], message


def test_an_empty_file_is_refused(tmp_path):
    with pytest.raises(DataError, match="holds no problem"):
        load_problems(write(tmp_path, "", " "), CONFIG)


def test_a_missing_file_is_a_setting_to_mend():
    with pytest.raises(ConfigError, match=r"data\.path='no_such.jsonl'"):
        load_problems("no_such.jsonl", CONFIG)


def test_a_file_that_is_not_utf8_is_refused(tmp_path):
    path = tmp_path / "latin.jsonl"
    path.write_bytes(b'{"prompt": "\xe9"}')
    with pytest.raises(DataError, match="not UTF-8 at byte 12"):
        load_problems(path, CONFIG)


def test_a_repeated_prompt_is_warned_of_with_counts():
    rows = [Problem("a", "1", line) for line in range(100)] + [Problem("b", "2", 101)]
    said = duplicates(rows, "p.jsonl")
    assert said is not None and "p.jsonl: 101 rows hold 2 distinct prompts (the commonest 100 times)" in said
    assert "contradictory" not in said
    assert duplicates(rows[99:], "p.jsonl") is None


def test_equal_answers_in_two_spellings_are_not_contradictory():
    for one, other in (("073", "73"), ("0.5", "1/2"), ("$7$", "7"), ("1,000", "1000")):
        said = duplicates([Problem("a", one, 1), Problem("a", other, 2)], "f")
        assert said is not None and "contradictory" not in said


@pytest.mark.parametrize("written", ["0.12345678901234567890", "9007199254740993.0", "1.5", "1e3", "1.50"])
def test_a_decimal_number_keeps_its_value(tmp_path, written):
    [problem] = load_problems(write(tmp_path, f'{{"prompt": "x", "answer": {written}}}'), CONFIG)
    assert Decimal(problem.answer) == Decimal(written)


@pytest.mark.parametrize(
    "text",
    [
        "3+4=7 so it is\n#### 7", "#### 7", "\\fbox{7}", "\\boxed 7", "\\(7\\)", "\\[7\\]", "**7**", "`7`",
        "<answer>7</answer>", "The answer is 7", "Answer: 7", "so 3+4=7\nand thus 7",
        "there are seven of them left in the basket", "\uff17", "\u0667", "\u096d", "\u00bd", "x\u00b2", "\u2166",
        "\U0001d7d5", "3\u20134", "\u20147", "3\u20114", "\uff0d7", "7\u200b", "\ufeff7", "7\u00ad0", "\u200e7",
        "7\x00", "1\u20442", "7\u00b0", "2\u221a3", "1\uff0c000", "1e5", "2.5E-3", "1 000", "12 345.5", "1_000",
        "NaN", "null",
        "N/A", "#REF!",
    ],
)  # fmt: skip
def test_a_reference_that_hardly_any_response_matches_is_shown(text):
    said = unmatchable([("line 1", "7"), ("line 2", text), ("line 3", text)])
    assert said is not None and said.startswith("hardly any response can match 2 references; the first: line 2, ")
    assert said.count("\n") == 0


@pytest.mark.parametrize(
    "text",
    [
        "7", "-7", "\u22127", "1,000", "$7$", "0.5", "\\frac{1}{2}", "x = 7", "\\left(3, 4\\right)", "2\\sqrt{3}",
        "50\\%", "\\begin{pmatrix} a &= 1 \\\\[2pt]\n 2 \\end{pmatrix}", "\\text{no real solution}", "3\u03c0",
        "\u662f\u3002", "caf\u00e9", "1 2 3", "a, b, c, d, e, f, g, h, i", "1\u00a0km", "[1, 2]", "x < 3",
        "1 0 1\n0 1 0", "naive",
    ],
)  # fmt: skip
def test_a_plain_reference_is_not_doubted(text):
    assert unmatchable([("line 1", text)]) is None


def test_contradictory_answers_of_one_prompt_are_counted():
    rows = [Problem("a", "1", 1), Problem("a", "2", 2), Problem("b", "3", 3)]
    said = duplicates(rows, "p.jsonl")
    assert said is not None and said.endswith("; 1 prompt has contradictory answers")
    said = duplicates([*rows, Problem("b", "4", 4)], "p.jsonl")
    assert said is not None and said.endswith("; 2 prompts have contradictory answers")


def test_distinct_keeps_the_first_row_of_each_prompt_in_order():
    rows = [Problem("b", "1", 1), Problem("a", "2", 2), Problem("b", "3", 3)]
    assert distinct(rows) == rows[:2]


PROBLEMS = [Problem("a", "1", 1), Problem("b" * 50, "2", 3), Problem("c", "3", 4)]


def render(problem: Problem) -> list[int]:
    return [1] * len(problem.prompt)


def test_an_over_long_prompt_is_refused_with_its_line_and_length():
    with pytest.raises(DataError, match=r"p.jsonl, line 3: the prompt has 50 tokens, 49 fit"):
        render_prompts(PROBLEMS, render, 49, "refuse", "p.jsonl")


def test_over_long_prompts_are_dropped_when_asked():
    kept, prompts = render_prompts(PROBLEMS, render, 49, "drop", "p.jsonl")
    assert [p.prompt for p in kept] == ["a", "c"]
    assert [len(p) for p in prompts] == [1, 1]
    with pytest.raises(DataError, match="all 3 prompts"):
        render_prompts(PROBLEMS, render, 0, "drop", "p.jsonl")


@pytest.mark.parametrize(("size", "count"), [(10, 3), (4, 8), (7, 7), (1, 2)])
def test_every_epoch_visits_every_problem_once_also_across_steps(size, count):
    stream = ProblemStream(size, seed=5, shuffle=True)
    seen = [i for step in range(20) for i in stream.indices(step, count)]
    for epoch in range(len(seen) // size):
        assert sorted(seen[epoch * size : (epoch + 1) * size]) == list(range(size))


def test_the_order_is_a_function_of_seed_and_step_alone():
    straight = ProblemStream(10, seed=5, shuffle=True)
    orders = [straight.indices(step, 3) for step in range(9)]
    resumed = ProblemStream(10, seed=5, shuffle=True)
    assert [resumed.indices(step, 3) for step in (7, 2, 8)] == [orders[7], orders[2], orders[8]]
    assert orders != [ProblemStream(10, seed=6, shuffle=True).indices(step, 3) for step in range(9)]
    assert orders[:3] != orders[3:6]
    assert ProblemStream(4, seed=5, shuffle=False).indices(1, 3) == [3, 0, 1]


@pytest.mark.parametrize(
    "line",
    [
        '{"prompt": "x", "answer": ' + "9" * 5000 + "}",
        "[" * 100_000,
        json.dumps({"prompt": "x \ud800", "answer": "1"}),
        json.dumps({"prompt": "x", "answer": "\ud800"}),
    ],
    ids=["long integer", "deep nesting", "half a pair in the prompt", "half a pair in the answer"],
)
def test_a_hostile_line_is_one_line_of_error(tmp_path, line):
    path = write(tmp_path, json.dumps(GOOD), line)
    with pytest.raises(DataError, match="line 2") as error:
        load_problems(path, CONFIG)
    assert "\n" not in str(error.value)
    str(error.value).encode()  # the message itself can be printed
