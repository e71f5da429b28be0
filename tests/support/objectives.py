"""Objectives, and the gradients that they leave."""

from __future__ import annotations

import dataclasses

import torch

from update.update import batch_loss

OBJECTIVES = {
    "dapo": {},
    "grpo, token weights": {"policy": "grpo", "importance": "token"},
    "dr_grpo, dual clip, sequence mask": {"policy": "dr_grpo", "dual_clip": 3.0, "importance": "sequence_mask"},
    "gspo, KL k2": {"policy": "gspo", "kl_coef": 0.1, "kl_estimator": "k2"},
    "cispo, KL k3, sequence weights": {"policy": "cispo", "kl_coef": 0.1, "importance": "sequence"},
}


def shift(values: torch.Tensor, batch) -> torch.Tensor:
    """Stands for other weights: a change that is a function of the token alone."""
    return values + 0.3 * torch.sin(batch.targets.float())


def leave_gradients(policy, batches) -> torch.Tensor:
    """Gradients of an update, off policy and off reference, are left in the engine; returns this rank's loss."""
    total = torch.zeros((), dtype=torch.float64)
    policy.train()
    for index, batch in enumerate(batches):
        out = policy.token_logprobs(batch)
        old = shift(out.logprobs.detach(), batch)
        batch = dataclasses.replace(batch, behaviour_logprobs=shift(old, batch))
        reference = shift(old, batch) if policy.config.loss.kl_coef else None
        value, _ = batch_loss(out, batch, old, reference, policy.config.loss)
        policy.backward(value, last=index == len(batches) - 1)
        total += value.detach()
    return total
