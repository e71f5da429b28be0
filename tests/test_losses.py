"""The policy loss against a direct fp64 restatement of its formula; a flipped term must be noticed."""

from __future__ import annotations

import math

import pytest
import torch

from losses import grpo_policy_loss

LOW, HIGH = 0.2, 0.28
OLD = [-1.0, -0.5, -2.0, -0.1, -3.0, -0.7]
RATIO = [1.0, 1.5, 1.5, 0.5, 0.5, 1.1]
ADVANTAGE = [1.0, 1.0, -1.0, 1.0, -1.0, -0.5]
WEIGHT = [0.1, 0.2, 0.1, 0.3, 0.2, 0.1]


def oracle() -> tuple[float, list[float]]:
    """Loss and its gradient by the log-probabilities, token by token."""
    loss, gradient = 0.0, []
    for ratio, advantage, weight in zip(RATIO, ADVANTAGE, WEIGHT, strict=True):
        bounded = min(max(ratio, 1 - LOW), 1 + HIGH)
        loss -= weight * min(ratio * advantage, bounded * advantage)
        inside = ratio * advantage <= bounded * advantage
        gradient.append(-weight * advantage * ratio if inside else 0.0)
    return loss, gradient


def compute(old=OLD, ratio=RATIO, advantage=ADVANTAGE, weight=WEIGHT):
    old = torch.tensor(old, dtype=torch.float64)
    logprobs = (old + torch.tensor(ratio, dtype=torch.float64).log()).requires_grad_()
    result = grpo_policy_loss(
        logprobs,
        old,
        torch.tensor(advantage, dtype=torch.float64),
        torch.tensor(weight, dtype=torch.float64),
        LOW,
        HIGH,
    )
    return result, torch.autograd.grad(result.loss, logprobs)[0]


def test_loss_and_gradient_equal_the_formula():
    expected, expected_gradient = oracle()
    result, gradient = compute()
    assert math.isclose(result.loss.item(), expected, rel_tol=1e-12)
    torch.testing.assert_close(gradient, torch.tensor(expected_gradient, dtype=torch.float64), rtol=1e-12, atol=0)


@pytest.mark.parametrize("term", ["ratio", "advantage", "weight", "swapped clip"])
def test_the_oracle_notices_a_changed_term(term):
    expected, _ = oracle()
    changes = {
        "ratio": {"ratio": [1 / r for r in RATIO]},
        "advantage": {"advantage": [-a for a in ADVANTAGE]},
        "weight": {"weight": [-w for w in WEIGHT]},
        "swapped clip": {"ratio": [2 - r for r in RATIO]},
    }[term]
    assert not math.isclose(compute(**changes)[0].loss.item(), expected, rel_tol=1e-3)


def test_the_gradient_is_zero_where_clipped_and_only_there():
    result, gradient = compute()
    assert result.clipped.tolist() == [False, True, False, False, True, False]
    assert (gradient == 0).tolist() == result.clipped.tolist()


def test_on_policy_the_gradient_is_the_plain_policy_gradient():
    _, gradient = compute(ratio=[1.0] * 6)
    torch.testing.assert_close(
        gradient, -torch.tensor(WEIGHT, dtype=torch.float64) * torch.tensor(ADVANTAGE, dtype=torch.float64)
    )


def test_a_raised_advantage_raises_the_probability():
    _, gradient = compute(ratio=[1.0] * 6)
    assert gradient[0] < 0 < gradient[2]  # the loss falls where a good token becomes likelier
