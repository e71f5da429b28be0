"""Figures over problems, not over samples; comparisons problem by problem; nothing hides behind a score."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from config import parse_config
from data import Problem
from evaluation.grading import BoxGrader
from evaluation.scores import (
    SEED_OFFSET,
    Evaluation,
    compare,
    eval_sampling,
    metrics,
    problem_rows,
    results,
    summarize,
    table_lines,
    write_results,
)
from rollout.records import StopReason
from tests.support.builders import record

CONFIG = parse_config({
    "model": {"path": "m"}, "data": {"path": "d"},
    "eval": {"path": "e.jsonl", "samples_per_prompt": 2, "temperature": 0.6, "top_p": 0.95, "top_k": 20},
})  # fmt: skip


def evaluation(texts: list[list[str]], answers: list[str], stop=StopReason.ANSWERED) -> Evaluation:
    """Each sample's final text, by problem."""
    said: dict[tuple[int, ...], str] = {}
    records = []
    for prompt, samples in enumerate(texts):
        for sample, text in enumerate(samples):
            made = record("PA", prompt=prompt, sample=sample, first_id=100 * prompt + 2 * sample)
            said[made.token_ids[1:]] = text
            records.append(dataclasses.replace(made, stop=stop))
    problems = [Problem(f"problem {i}", answer, i + 1) for i, answer in enumerate(answers)]
    grader = BoxGrader(lambda ids: said[tuple(ids)])
    grader.expect(problems)
    return Evaluation.of(records, grader.grades(records), problems, lambda ids: said[tuple(ids)])


def of_outcomes(outcomes: list[list[bool]]) -> Evaluation:
    return evaluation(
        [[f"\\boxed{{{1 if right else 2}}}" for right in row] for row in outcomes], ["1"] * len(outcomes)
    )


def test_mean_pass_majority_and_standard_error():
    got = summarize(of_outcomes([[True, False], [False, False], [True, True], [True, False]]), seed=0)
    assert (got["problems"], got["k"]) == (4, 2)
    assert got["avg"]["value"] == got["pass"]["1"]["value"] == 0.5
    assert got["pass"]["2"]["value"] == 0.75
    assert got["maj"]["value"] == 0.5  # 1/2, 0, 1, 1/2: ties by lot
    assert got["avg"]["stderr"] == pytest.approx(np.sqrt((0 + 0.25 + 0.25 + 0) / 3 / 4))
    assert got["avg"]["low"] < 0.5 < got["avg"]["high"]
    assert got["avg"]["min_difference"] == pytest.approx(2.8016 * np.sqrt(2) * got["avg"]["stderr"], rel=1e-3)


def test_equal_answers_vote_together_however_they_are_written():
    texts = [["\\boxed{0.5}", "\\boxed{\\frac{1}{2}}", "\\boxed{1/2}", "\\boxed{3}", "\\boxed{3}"]]
    got = evaluation(texts, ["1/2"])
    assert got.per_problem()[0, -1] == 1.0
    assert got.correct.tolist() == [[True, True, True, False, False]]


def test_cut_and_boxless_answers_stand_beside_the_score():
    cut = summarize(evaluation([["\\boxed{1}", "\\boxed{1}"]], ["1"], stop=StopReason.TURN_TOKENS), seed=0)
    assert (cut["avg"]["value"], cut["cut"], cut["boxless"]) == (0.0, 1.0, 0.0)
    boxless = summarize(evaluation([["the answer is 1", "\\boxed{1"]], ["1"]), seed=0)
    assert (boxless["avg"]["value"], boxless["cut"], boxless["boxless"]) == (0.0, 0.0, 1.0)
    lines = "\n".join(table_lines(results(CONFIG, {"on": evaluation([["1", "1"]], ["1"])}, step=3)))
    assert "no box" in lines and "100.0%" in lines


def test_a_spoilt_trajectory_counts_as_wrong_and_is_named():
    spoilt = evaluation([["\\boxed{1}", "\\boxed{1}"]], ["1"], stop=StopReason.TOOL_INFRA)
    found = results(CONFIG, {"on": spoilt}, step=0)
    assert (found["scores"]["on"]["infra"], found["scores"]["on"]["avg"]["value"]) == (1.0, 0.0)
    assert "sandbox failed in 100.0%" in "\n".join(table_lines(found))


def test_a_comparison_is_paired():
    hard_and_easy = [[False, False]] * 20 + [[True, True]] * 20
    better = [[False, True]] * 6 + [[False, False]] * 14 + [[True, True]] * 20  # six hard problems gain half
    one, other = of_outcomes(better), of_outcomes(hard_and_easy)
    paired = compare(one, other, seed=0)
    apart = summarize(one, 0)["avg"], summarize(other, 0)["avg"]
    assert apart[0]["low"] < apart[1]["high"]  # the two intervals overlap
    assert paired["avg"]["value"] == pytest.approx(0.075) and paired["avg"]["significant"]
    assert paired["min_difference"] < apart[0]["min_difference"]
    assert paired["pass@2"]["value"] == pytest.approx(0.15)


def test_equal_evaluations_do_not_differ():
    one = of_outcomes([[True, False]] * 10)
    assert compare(one, one, seed=0)["avg"] == {"value": 0.0, "low": 0.0, "high": 0.0, "significant": False}


def test_each_problem_has_its_row_with_answers_under_each_treatment():
    on, off = evaluation([["\\boxed{7}", "\\boxed{7}"]], ["7"]), evaluation([["\\boxed{8}", "none"]], ["7"])
    [row] = problem_rows({"on": on, "off": off})
    assert (row["line"], row["prompt"], row["answer"]) == (1, "problem 0", "7")
    assert row["on"] == {"right": 2, "of": 2, "answers": {"7": 2}, "reasons": {"correct": 2}}
    assert row["off"]["answers"] == {"8": 1, "(none)": 1}


def test_results_name_every_setting_that_the_score_depends_on(tmp_path):
    found = results(CONFIG, {"on": of_outcomes([[True, False]]), "off": of_outcomes([[False, False]])}, step=7)
    path = tmp_path / "deep/results.json"
    write_results(path, found)
    read = json.loads(path.read_text())
    assert read["settings"] == {
        "max_new_tokens": 2048, "temperature": 0.6, "n_samples_per_prompt": 2, "max_turns": 16, "context_length": 8192,
        "seed": SEED_OFFSET, "top_k": 20, "top_p": 0.95, "model": "m", "path": "e.jsonl", "step": 7,
    }  # fmt: skip
    assert set(read["differences"]) == {"on - off"}
    assert [p.name for p in path.parent.iterdir()] == ["results.json"]
    head = table_lines(found)[0]
    assert "on: pass@k 1: 0.500, 2: 1.000" in table_lines(found)
    assert all(word in head for word in ("k = 2", "temperature 0.6", "top_p 0.95", "top_k 20", "2048 tokens a turn"))


def test_the_metrics_line_holds_plain_numbers():
    figures = metrics(summarize(of_outcomes([[True, False], [True, True]]), seed=0))
    assert (figures["avg_at_k"], figures["pass_at_k"], figures["maj_at_k"]) == (0.75, 1.0, 0.75)
    assert all(isinstance(value, int | float) for value in figures.values())


def test_evaluation_samples_with_its_own_settings_and_noise():
    sampling = eval_sampling(CONFIG)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.n_samples_per_prompt) == (0.6, 0.95, 20, 2)
    assert sampling.seed != CONFIG.train.seed
