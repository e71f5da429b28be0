"""Policy losses as pure functions over the trained tokens of a micro-batch, [N].

Each token carries a weight that already holds the global denominator, so a sum over micro-batches and ranks is the
loss of the whole step whatever the split. Advantages are constants.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    loss: Tensor  # scalar, fp32
    clipped: Tensor  # [N] bool: the ratio left the clip range on the side where the gradient is zero


def grpo_policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, weights: Tensor, clip_low: float, clip_high: float
) -> PolicyLoss:
    """PPO-clip (Schulman et al. 2017, eq. 7) with separate bounds (DAPO, Yu et al. 2025, eq. 10); no KL term.

    L = -sum_i w_i min(r_i A_i, clip(r_i, 1 - clip_low, 1 + clip_high) A_i),  r_i = exp(logp_i - old_i)

    logprobs, old_logprobs, advantages, weights: fp32  # [N] each
    """
    ratio = torch.exp(logprobs - old_logprobs)
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
    surrogate = torch.minimum(ratio * advantages, bounded * advantages)
    with torch.no_grad():
        clipped = ((advantages > 0) & (ratio > 1 + clip_high)) | ((advantages < 0) & (ratio < 1 - clip_low))
    return PolicyLoss(-(weights * surrogate).sum(), clipped)
