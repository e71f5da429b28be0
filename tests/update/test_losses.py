"""Properties of the losses that need no oracle; their values are checked in test_objectives.py."""

from __future__ import annotations

import pytest
import torch

from config import LossConfig
from update.losses import clip_range, kl_penalty, policy_losses, row_means

POLICIES = ("dapo", "grpo", "dr_grpo", "gspo", "cispo")
ROWS = torch.tensor([0, 0, 0, 1, 1, 3])  # row 2 has no token
ADVANTAGE = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, 0.5], dtype=torch.float64)


def gradient(policy: str, ratio: float) -> torch.Tensor:
    logprobs = torch.full((6,), -1.0, dtype=torch.float64, requires_grad=True)
    old = logprobs.detach() - torch.tensor(ratio, dtype=torch.float64).log()
    values = policy_losses(logprobs, old, ADVANTAGE, ROWS, 4, LossConfig(policy=policy)).values
    return torch.autograd.grad(values.sum(), logprobs)[0]


@pytest.mark.parametrize("policy", POLICIES)
def test_on_policy_every_loss_has_the_plain_policy_gradient(policy):
    torch.testing.assert_close(gradient(policy, 1.0), -ADVANTAGE, rtol=1e-12, atol=0)


@pytest.mark.parametrize("policy", ("dapo", "grpo", "dr_grpo", "gspo"))
def test_a_ratio_far_outside_has_no_gradient_on_the_side_it_left(policy):
    assert gradient(policy, 3.0).ne(0).tolist() == [False] * 3 + [True] * 2 + [False]
    assert gradient(policy, 0.1).ne(0).tolist() == [True] * 3 + [False] * 2 + [True]


@pytest.mark.parametrize("policy", ("dapo", "grpo", "dr_grpo", "gspo"))
@pytest.mark.parametrize("c", [2.5, 10.0])  # 10: the retool recipe's
def test_g16_dual_clip_bounds_a_bad_token_at_c_and_takes_its_gradient_beyond(policy, c):
    for ratio, moves in [(c - 0.1, True), (c + 0.1, False), (1000.0, False)]:
        logprobs = torch.full((6,), -1.0, dtype=torch.float64, requires_grad=True)
        old = logprobs.detach() - torch.tensor(ratio, dtype=torch.float64).log()
        values = policy_losses(logprobs, old, ADVANTAGE, ROWS, 4, LossConfig(policy=policy, dual_clip=c)).values
        slope = torch.autograd.grad(values.sum(), logprobs)[0]
        bad = ADVANTAGE < 0
        torch.testing.assert_close(values[bad], -min(ratio, c) * ADVANTAGE[bad], rtol=1e-12, atol=0)
        assert slope[bad].ne(0).tolist() == [moves] * int(bad.sum())


def test_switching_the_loss_by_one_word_brings_its_papers_clip_range():
    assert clip_range(LossConfig()) == clip_range(LossConfig(policy="grpo")) == (0.2, 0.28)
    assert clip_range(LossConfig(policy="gspo")) == (3e-4, 4e-4)
    assert clip_range(LossConfig(policy="cispo")) == (1.0, 4.0)
    assert clip_range(LossConfig(policy="gspo", clip_low=0.1, clip_high=0.3)) == (0.1, 0.3)


def test_a_row_mean_sees_its_own_row_alone():
    values = torch.tensor([1.0, 2.0, 6.0, 4.0, 8.0, 5.0])
    assert row_means(values, ROWS, 4).tolist() == [3.0, 3.0, 3.0, 6.0, 6.0, 5.0]


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_equal_policies_have_no_kl_and_no_gradient_but_k1s(estimator):
    logprobs = torch.tensor([-0.5, -2.0], dtype=torch.float64, requires_grad=True)
    values = kl_penalty(logprobs, logprobs.detach(), estimator)
    assert values.tolist() == [0.0, 0.0]
    slope = torch.autograd.grad(values.sum(), logprobs)[0]
    assert slope.tolist() == ([1.0, 1.0] if estimator == "k1" else [0.0, 0.0])


def test_the_estimators_mean_is_the_kl_and_k2s_gradient_is_the_kls():
    """Over a whole vocabulary: expectations under the policy, with the samples held fixed."""
    logits = torch.tensor([0.3, -0.5, 1.0, 0.1], dtype=torch.float64, requires_grad=True)
    logprobs, reference = (
        logits.log_softmax(0),
        torch.tensor([0.2, 0.1, -0.3, 0.4], dtype=torch.float64).log_softmax(0),
    )
    probabilities = logprobs.exp()
    kl = (probabilities * (logprobs - reference)).sum()
    for estimator in ("k1", "k3"):
        mean = (probabilities * kl_penalty(logprobs, reference, estimator)).sum()
        torch.testing.assert_close(mean, kl, rtol=1e-12, atol=0)
    [wanted] = torch.autograd.grad(kl, logits, retain_graph=True)
    as_loss = (probabilities.detach() * kl_penalty(logprobs, reference, "k2")).sum()
    [got] = torch.autograd.grad(as_loss, logits, retain_graph=True)
    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-14)
    nowhere = (probabilities.detach() * kl_penalty(logprobs, reference, "k1")).sum()
    assert torch.autograd.grad(nowhere, logits)[0].abs().max() < 1e-15
