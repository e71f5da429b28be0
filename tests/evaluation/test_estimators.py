"""The estimators against their definitions, by brute force; intervals against their promised coverage."""

from __future__ import annotations

from itertools import combinations
from math import comb

import numpy as np
import pytest

from evaluation.estimators import bootstrap, majority, min_difference, pass_at_k, standard_error


def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample():
    correct = np.random.default_rng(1).random((6, 7)) < np.linspace(0, 1, 6)[:, None]
    got = pass_at_k(correct)
    for row, values in zip(correct, got, strict=True):
        for k in range(1, 8):
            subsets = list(combinations(row, k))
            assert values[k - 1] == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)


@pytest.mark.parametrize(("right", "k"), [(1, 1), (3, 16), (40, 2), (63, 64), (0, 5), (64, 1)])
def test_pass_at_k_is_the_formula_of_chen_et_al(right, k):
    correct = np.zeros((1, 64), bool)
    correct[0, :right] = True
    expected = 1 - comb(64 - right, k) / comb(64, k)
    assert pass_at_k(correct)[0, k - 1] == pytest.approx(expected, abs=1e-12)


def test_the_commonest_answer_counts_and_ties_are_shared():
    votes = np.array([[0, 0, 2, 3], [0, 1, 1, 0], [-1, -1, -1, 3], [-1] * 4, [0, 1, 2, 3]])
    correct = np.array([[1, 1, 0, 0], [1, 0, 0, 1], [0, 0, 0, 1], [0] * 4, [0, 1, 0, 0]], bool)
    assert majority(votes, correct).tolist() == [1.0, 0.5, 1.0, 0.0, 0.25]


def test_a_wrong_majority_is_wrong_however_many_are_right():
    votes = np.array([[0, 0, 0, 3, 3]])
    assert majority(votes, votes == 3).tolist() == [0.0]


def test_intervals_repeat_with_their_seed_and_hold_the_mean():
    values = np.random.default_rng(2).random((30, 3))
    one, again, other = bootstrap(values, 0), bootstrap(values, 0), bootstrap(values, 1)
    assert one == again != other
    for column, interval in zip(values.T, one, strict=True):
        assert interval.value == pytest.approx(column.mean())
        assert interval.low < interval.value < interval.high


def test_intervals_narrow_as_the_normal_one_does():
    values = np.random.default_rng(3).random((400, 1))
    [interval] = bootstrap(values, 0)
    assert interval.high - interval.low == pytest.approx(2 * 1.96 * standard_error(values[:, 0]), rel=0.05)


def test_intervals_cover_the_truth_about_as_often_as_they_say():
    rng = np.random.default_rng(4)
    p = 0.3
    columns = rng.binomial(8, p, size=(100, 300)) / 8  # 300 evaluations of 100 problems, 8 samples each
    inside = [interval.low <= p <= interval.high for i in range(0, 300, 50) for interval in
              bootstrap(columns[:, i : i + 50], i)]  # fmt: skip
    assert 0.90 <= np.mean(inside) <= 0.99


def test_scores_that_are_all_alike_get_the_exact_binomial_bound():
    zero, one, half = bootstrap(np.column_stack([np.zeros(30), np.ones(30), np.full(30, 0.5)]), 0)
    assert (zero.low, round(zero.high, 3)) == (0.0, 0.116)  # Clopper-Pearson: 0 of 30
    assert (round(one.low, 3), one.high) == (0.884, 1.0)
    assert (half.low, half.high) == (0.5, 0.5)
    [difference] = bootstrap(np.ones((30, 1)), 0, shares=False)
    assert difference.low == 1.0


def test_blocks_of_resamples_do_not_change_what_is_estimated(monkeypatch):
    values = np.random.default_rng(5).random((50, 2))
    whole = bootstrap(values, 0)
    monkeypatch.setattr("evaluation.estimators._BLOCK", 50 * 1000)
    for a, b in zip(whole, bootstrap(values, 0), strict=True):
        assert (a.low, a.high) == pytest.approx((b.low, b.high), abs=0.01)


def test_a_difference_of_the_named_size_is_found_in_four_of_five_repetitions():
    rng = np.random.default_rng(6)
    error = 0.05
    size = min_difference(error, 1000, 1000)
    seen = rng.normal(size, error, 20_000)
    assert np.mean(np.abs(seen) > 1.96 * error) == pytest.approx(0.8, abs=0.01)


def test_no_difference_finer_than_one_sample_of_one_problem_is_promised():
    assert min_difference(0.0, 30, 16) == 1 / 480
