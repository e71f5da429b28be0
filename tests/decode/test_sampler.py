"""The sampler draws from softmax(logits) and records the log-probability of that very distribution."""

from __future__ import annotations

import pytest
import torch

from decode.noise import row_key
from decode.sampler import sample, truncate
from modeling.logprob import head_logits

DRAWS = 40_000
# 99.99 % quantile of chi-square with 7 degrees of freedom
CHI_SQUARE_LIMIT = 29.9


def draw(logits: torch.Tensor, count: int, temperature: float = 1.0):
    keys = torch.tensor([row_key(5, 0, i, 0) for i in range(count)], dtype=torch.int64).to(torch.int32)
    return sample(logits.expand(count, -1), keys, torch.full((count,), 17), temperature)


def chi_square(tokens: torch.Tensor, expected: torch.Tensor) -> float:
    counts = torch.bincount(tokens, minlength=len(expected)).double()
    wanted = expected.double() * len(tokens)
    return ((counts - wanted) ** 2 / wanted).sum().item()


def test_draws_follow_the_softmax():
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, -2.0, -3.0])
    tokens, _ = draw(logits, DRAWS)
    assert chi_square(tokens, logits.softmax(-1)) < CHI_SQUARE_LIMIT
    assert chi_square(tokens, (logits * 0.9).softmax(-1)) > CHI_SQUARE_LIMIT  # the test would notice


def test_draws_of_one_trajectory_follow_the_softmax_over_positions():
    logits = torch.tensor([1.0, 0.8, 0.5, 0.0, -0.5, -1.0, -1.5, -2.0])
    keys = torch.tensor([row_key(5, 0, 0, 0)], dtype=torch.int64).to(torch.int32).expand(DRAWS, 2)
    tokens, _ = sample(logits.expand(DRAWS, -1), keys, torch.arange(DRAWS), 1.0)
    assert chi_square(tokens, logits.softmax(-1)) < CHI_SQUARE_LIMIT


def test_the_log_probability_is_that_of_the_drawn_token():
    logits = torch.randn(315)
    tokens, logprobs = draw(logits, 100)
    torch.testing.assert_close(logprobs, logits.log_softmax(-1)[tokens])


def test_temperature_zero_takes_the_largest_logit_and_the_lowest_id_of_equals():
    logits = torch.tensor([0.0, 3.0, 3.0, 1.0])
    tokens, logprobs = draw(logits, 4, temperature=0.0)
    assert tokens.tolist() == [1] * 4
    torch.testing.assert_close(logprobs, logits.log_softmax(-1)[tokens])


def test_the_head_divides_by_the_temperature_and_leaves_greedy_logits():
    hidden, weight = torch.randn(3, 8), torch.randn(11, 8)
    plain = hidden @ weight.T
    torch.testing.assert_close(head_logits(hidden, weight, 0.6), plain / 0.6)
    torch.testing.assert_close(head_logits(hidden, weight, 0.0), plain)


PROBABILITIES = torch.tensor([[0.1, 0.4, 0.3, 0.2], [0.25, 0.25, 0.25, 0.25], [0.97, 0.01, 0.01, 0.01]])
ALL = [[0, 1, 2, 3]] * 3


@pytest.mark.parametrize(
    ("top_k", "top_p", "kept"),
    [
        (0, 1.0, ALL),
        (9, 1.0, ALL),
        (2, 1.0, [[1, 2], [0, 1, 2, 3], ALL[0]]),  # equals of the last one stay
        (1, 1.0, [[1], [0, 1, 2, 3], [0]]),
        (0, 0.65, [[1, 2], [0, 1, 2, 3], [0]]),
        (0, 0.4, [[1], [0, 1, 2, 3], [0]]),
        (0, 1e-9, [[1], [0, 1, 2, 3], [0]]),
        (2, 0.5, [[1], [0, 1, 2, 3], [0]]),  # top_p of what top_k left: 0.4 of 0.7 is 0.57
    ],
)
def test_truncation_keeps_the_likeliest_tokens(top_k, top_p, kept):
    got = truncate(PROBABILITIES.log(), top_k, top_p)
    assert [row.isfinite().nonzero().flatten().tolist() for row in got] == kept
    torch.testing.assert_close(got[got.isfinite()], PROBABILITIES.log()[got.isfinite()])


def test_truncated_draws_follow_what_is_left_and_record_its_log_probability():
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, -2.0, -3.0])
    left = truncate(logits[None], 4, 1.0)[0]
    tokens, logprobs = draw(left, DRAWS)
    assert tokens.max() < 4
    expected = logits[:4].softmax(-1)
    assert chi_square(tokens, expected) < CHI_SQUARE_LIMIT
    torch.testing.assert_close(logprobs, expected.log()[tokens])
