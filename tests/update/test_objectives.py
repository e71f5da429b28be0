"""Every objective, value and gradient in fp64, against the formula of its paper on records with tool spans, a cut turn
and a single-token response; and each formula with one term changed must be noticed."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.support.oracle import agrees, config, mutant, ours
from update import losses, minibatch, update

POLICIES = ("dapo", "grpo", "dr_grpo", "gspo", "cispo")
IMPORTANCE = ("off", "token", "sequence", "token_mask", "sequence_mask")
EXTRAS = [
    {}, {"kl_coef": 0.1, "kl_estimator": "k2"},
    {"kl_coef": 0.1, "kl_estimator": "k3"},
]  # fmt: skip


@pytest.mark.parametrize(("policy", "importance"), list(itertools.product(POLICIES, IMPORTANCE)))
def test_loss_and_gradient_equal_the_papers_formula(policy, importance):
    for extra in EXTRAS:
        assert agrees(config(policy=policy, importance=importance, **extra)), extra
    if policy != "cispo":
        assert agrees(config(policy=policy, importance=importance, dual_clip=2.5))


# module, text, replacement, and a setting under which the change must be seen
MUTATIONS = [
    (losses, "loss((tokens.logprobs - tokens.old_logprobs)", "loss((tokens.old_logprobs - tokens.logprobs)", {}),
    (losses, "ratio.clamp(1 - clip.low, 1 + clip.high)\n    surrogate",
     "ratio.clamp(1 - clip.high, 1 + clip.low)\n    surrogate", {}),
    (losses, "surrogate = torch.minimum(", "surrogate = torch.maximum(", {}),
    (losses, "torch.minimum(ratio * advantages, bounded * advantages)", "bounded * advantages", {}),
    (losses, "TokenLosses(-surrogate", "TokenLosses(surrogate", {}),
    (losses, "torch.maximum(surrogate, clip.dual", "torch.minimum(surrogate, clip.dual", {"dual_clip": 2.5}),
    (losses, "torch.where(negative, torch.maximum", "torch.where(~negative, torch.maximum", {"dual_clip": 2.5}),
    (losses, "(sums / counts.clamp(min=1))", "sums", {"policy": "gspo"}),
    (losses, "(3e-4, 4e-4)", "(4e-4, 3e-4)", {"policy": "gspo"}),
    (losses, "function=gspo_policy_loss", "function=grpo_policy_loss", {"policy": "gspo"}),
    (losses, "TokenLosses(-weights", "TokenLosses(weights", {"policy": "cispo"}),
    (losses, "(tokens.logprobs.detach() - tokens.old", "(tokens.logprobs - tokens.old", {"policy": "cispo"}),
    (losses, "tokens.logprobs.detach() - tokens.old_logprobs", "tokens.old_logprobs - tokens.logprobs.detach()",
     {"policy": "cispo"}),
    (losses, "difference = logprobs - reference", "difference = reference_logprobs - logprobs #", {"kl_coef": 0.1}),
    (losses, "expm1(-difference) + difference", "expm1(difference) - difference", {"kl_coef": 0.1}),
    (losses, "square() / 2", "square()", {"kl_coef": 0.1, "kl_estimator": "k2"}),
    (losses, "old_logprobs - behaviour", "behaviour_logprobs - old_logprobs #", {"importance": "token"}),
    (losses, "clamp(max=loss.importance_high)", "clamp(min=loss.importance_high)", {"importance": "token"}),
    (losses, 'in ("sequence", "sequence_mask")', 'in ("token",)', {"importance": "sequence"}),
    (losses, "ratio < loss.importance_low", "ratio < 0", {"importance": "token_mask"}),
    (losses, "ratio > loss.importance_high)\n    return", "ratio < 0)\n    return", {"importance": "token_mask"}),
    (losses, "(outside, 0.0, ratio)", "(outside, ratio, 0.0)", {"importance": "sequence_mask"}),
    (losses, "(outside, 0.0, ratio)", "(outside, 0.0, 1.0)", {"importance": "token_mask"}),
    (losses, "1.0 / sum(tokens)", "1.0 / len(tokens)", {"policy": "dapo"}),
    (losses, "(len(tokens) * count)", "len(tokens)", {"policy": "grpo"}),
    (losses, "(len(tokens) * budget)", "budget", {"policy": "dr_grpo"}),
    (minibatch, "rollout.max_turns * rollout.max_new_tokens", "rollout.max_new_tokens", {"policy": "dr_grpo"}),
    (update, "(importance.weights * policy.values)", "policy.values", {"importance": "token"}),
    (update, "Term(loss.kl_coef * kl,", "Term(-loss.kl_coef * kl,", {"kl_coef": 0.1}),
    (update, "Term(loss.kl_coef * kl,", "Term(importance.weights * loss.kl_coef * kl,",
     {"kl_coef": 0.1, "importance": "token"}),
    (update, "batch.weights * sum(term.values", "sum(term.values", {}),
    (update, "sum(term.values for term in terms)", "terms[0].values", {"kl_coef": 0.1}),
]  # fmt: skip


@pytest.mark.parametrize(("module", "text", "replacement", "settings"), MUTATIONS)
def test_a_changed_term_is_noticed(module, text, replacement, settings, monkeypatch):
    fresh = mutant(module, text, replacement)
    weigh, loss_of = minibatch.token_weights, update.batch_loss
    if module is update:
        loss_of = fresh.batch_loss
    elif module is minibatch:
        weigh = fresh.token_weights
        monkeypatch.setattr("tests.support.oracle.token_budget", fresh.token_budget)
    else:
        for name in ("policy_losses", "kl_penalty", "importance_weights"):
            if name in fresh.__dict__:
                monkeypatch.setattr(update, name, fresh.__dict__[name])
        monkeypatch.setattr(minibatch, "loss_named", fresh.loss_named)
    assert not agrees(config(**settings), weigh, loss_of)


@pytest.mark.parametrize("policy", ["dapo", "gspo"])
@pytest.mark.parametrize("dual_clip", [None, 2.5])
def test_the_gradient_is_zero_where_clipped_and_only_there(policy, dual_clip):
    _, gradient, columns = ours(config(policy=policy, dual_clip=dual_clip))
    clipped = columns.clipped.bool()
    assert 0 < clipped.sum() < len(clipped)
    assert torch.equal(gradient == 0, clipped)


@pytest.mark.parametrize("importance", ["token_mask", "sequence_mask"])
def test_the_gradient_is_zero_where_masked(importance):
    _, gradient, columns = ours(config(importance=importance))
    masked = columns.importance_cut.bool()
    assert 0 < masked.sum() < len(masked)
    assert (gradient[masked] == 0).all()
    assert (columns.importance[masked] == 0).all()


def test_cispo_keeps_the_gradient_of_every_token():
    _, gradient, columns = ours(config(policy="cispo", clip_high=0.1))
    assert columns.clipped.any()
    assert (gradient != 0).all()
