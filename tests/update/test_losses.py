"""Properties of the losses that need no oracle; their values are checked in test_objectives.py."""

from __future__ import annotations

import dataclasses
from typing import get_args, get_type_hints

import pytest
import torch

from audit import losses as audited
from config import ConfigError, LossConfig
from update.losses import LOSSES, Audited, clip_range, kl_penalty, policy_losses, row_means
from update.minibatch import token_weights

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


def test_config_and_table_know_the_same_losses():
    assert get_args(get_type_hints(LossConfig)["policy"]) == tuple(LOSSES)


def test_an_unknown_name_is_refused_in_one_line_by_the_update_its_weights_and_the_audit():
    unknown = LossConfig()
    object.__setattr__(unknown, "policy", "ppo")
    settings = {"loss": {"policy": "ppo", "old_policy": "update"}, "rollout": {}}
    ask = [
        lambda: clip_range(unknown),
        lambda: policy_losses(ADVANTAGE, ADVANTAGE, ADVANTAGE, ROWS, 4, unknown),
        lambda: token_weights([], "ppo", 1),
        lambda: audited.loss_of([], settings),
        lambda: audited.has_unit_ratios(1, settings),
    ]
    for question in ask:
        with pytest.raises(ConfigError, match=r"loss\.policy='ppo': must be one of dapo, grpo") as error:
            question()
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_audits_formula_is_the_loss_where_every_ratio_is_one(policy):
    row, budget, lengths = LOSSES[policy], 7, (3, 2, 1)
    rows = torch.tensor([0, 0, 0, 1, 1, 2])
    logprobs = torch.tensor([-0.5, -1.0, -0.25, -2.0, -0.125, -3.0], dtype=torch.float64)
    advantages = (1.0, -0.5, 0.25)
    weights = torch.tensor(row.token_weights(lengths, budget), dtype=torch.float64)[rows]
    each = torch.tensor(advantages, dtype=torch.float64)[rows]
    values = policy_losses(logprobs, logprobs, each, rows, 3, LossConfig(policy=policy)).values
    sums = [logprobs[rows == i].sum().item() for i in range(3)]
    plain = [Audited(a, n, s, 6, 3, budget) for a, n, s in zip(advantages, lengths, sums, strict=True)]
    assert sum(map(row.audited, plain)) == pytest.approx((weights * values).sum().item(), rel=1e-12)
    moved = [row.audited(dataclasses.replace(one, logprob=0.0)) for one in plain]
    assert (moved != list(map(row.audited, plain))) is row.holds_logprobs


def test_a_row_mean_sees_its_own_row_alone():
    values = torch.tensor([1.0, 2.0, 6.0, 4.0, 8.0, 5.0])
    assert row_means(values, ROWS, 4).tolist() == [3.0, 3.0, 3.0, 6.0, 6.0, 5.0]


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_equal_policies_have_no_kl_and_no_gradient(estimator):
    logprobs = torch.tensor([-0.5, -2.0], dtype=torch.float64, requires_grad=True)
    values = kl_penalty(logprobs, logprobs.detach(), estimator)
    assert values.tolist() == [0.0, 0.0]
    assert torch.autograd.grad(values.sum(), logprobs)[0].tolist() == [0.0, 0.0]


def test_k3s_mean_is_the_kl_and_k2s_gradient_is_the_kls():
    """Over a whole vocabulary: expectations under the policy, with the samples held fixed."""
    logits = torch.tensor([0.3, -0.5, 1.0, 0.1], dtype=torch.float64, requires_grad=True)
    logprobs, reference = (
        logits.log_softmax(0),
        torch.tensor([0.2, 0.1, -0.3, 0.4], dtype=torch.float64).log_softmax(0),
    )
    probabilities = logprobs.exp()
    kl = (probabilities * (logprobs - reference)).sum()
    mean = (probabilities * kl_penalty(logprobs, reference, "k3")).sum()
    torch.testing.assert_close(mean, kl, rtol=1e-12, atol=0)
    [wanted] = torch.autograd.grad(kl, logits, retain_graph=True)
    as_loss = (probabilities.detach() * kl_penalty(logprobs, reference, "k2")).sum()
    [got] = torch.autograd.grad(as_loss, logits, retain_graph=True)
    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-14)
