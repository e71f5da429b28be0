"""Policy losses and KL penalties as pure functions over the trained tokens of a micro-batch, [N].

A loss is given token by token; `update.py` multiplies each token by its weight, which already holds the global
denominator (`minibatch.token_weights`), so that a sum over micro-batches and ranks is the loss of the whole update
whatever the split. A row (trajectory) is never split over micro-batches, so sequence terms are exact. Advantages, old
and reference log-probabilities are constants.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from config import LossConfig

# clip_low and clip_high where they are null. Token ratios: DAPO section 4.1. gspo: GSPO section 5.1. cispo: no lower
# bound (MiniMax-M1 section 3.1) and weights up to 5, as in ScaleRL (2025).
CLIP_RANGE = {"gspo": (3e-4, 4e-4), "cispo": (1.0, 4.0)}
TOKEN_CLIP_RANGE = (0.2, 0.28)


@dataclass(frozen=True, slots=True)
class TokenLosses:
    values: Tensor  # [N] fp32, differentiable
    clipped: Tensor  # [N] bool: outside the clip range, where the gradient is zero (cispo: where its weight was cut)


def policy_losses(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, rows: Tensor, num_rows: int, loss: LossConfig
) -> TokenLosses:
    """The loss that `loss.policy` names. dapo, grpo and dr_grpo differ in their token weights alone.

    logprobs, old_logprobs, advantages: fp32  # [N] each
    rows: the row of each token, 0 .. num_rows - 1  # [N]
    """
    low, high = clip_range(loss)
    if loss.policy == "cispo":
        return cispo_policy_loss(logprobs, old_logprobs, advantages, low, high)
    log_ratio = logprobs - old_logprobs
    if loss.policy == "gspo":
        log_ratio = row_means(log_ratio, rows, num_rows)
    return grpo_policy_loss(log_ratio.exp(), advantages, low, high, loss.dual_clip)


def clip_range(loss: LossConfig) -> tuple[float, float]:
    """clip_low and clip_high as set, or else the ones of the loss's paper."""
    low, high = CLIP_RANGE.get(loss.policy, TOKEN_CLIP_RANGE)
    return (
        low if loss.clip_low is None else loss.clip_low,
        high if loss.clip_high is None else loss.clip_high,
    )


def grpo_policy_loss(
    ratio: Tensor, advantages: Tensor, low: float, high: float, dual_clip: float | None
) -> TokenLosses:
    """PPO-clip (Schulman et al. 2017, eq. 7) with separate bounds (DAPO, Yu et al. 2025, eq. 10) and dual clip.

    l = -min(r A, clip(r, 1 - low, 1 + high) A), and where A < 0 and c is set: l = -max(that min, c A)
    (dual clip: Ye et al. 2020, "Mastering Complex Control in MOBA Games with Deep Reinforcement Learning").

    ratio, advantages  # [N] each
    dual_clip: c > 1, or None for off
    """
    bounded = ratio.clamp(1 - low, 1 + high)
    surrogate = torch.minimum(ratio * advantages, bounded * advantages)
    negative = advantages < 0
    with torch.no_grad():
        clipped = ((advantages > 0) & (ratio > 1 + high)) | (negative & (ratio < 1 - low))
    if dual_clip is not None:
        surrogate = torch.where(negative, torch.maximum(surrogate, dual_clip * advantages), surrogate)
        clipped = clipped | (negative & (ratio > dual_clip)).detach()
    return TokenLosses(-surrogate, clipped)


def cispo_policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, low: float, high: float
) -> TokenLosses:
    """Clipped importance weights on the plain policy gradient (MiniMax-M1, 2025, section 3.1): no token is dropped.

    l = -sg(clip(r, 1 - low, 1 + high)) A log pi,  r = exp(logp - old), sg: no gradient.  All tensors [N].
    """
    ratio = (logprobs.detach() - old_logprobs).exp()
    weights = ratio.clamp(1 - low, 1 + high)
    return TokenLosses(-weights * advantages * logprobs, weights != ratio)


def kl_penalty(logprobs: Tensor, reference_logprobs: Tensor, estimator: str) -> Tensor:
    """Estimates of KL(policy || reference) from the policy's own tokens (Schulman 2020, "Approximating KL"), [N].

    With d = logp - ref:  k1 = d,  k2 = d^2 / 2,  k3 = exp(-d) - 1 + d. As a loss on its own samples k1 pulls nowhere
    (the mean of its gradient is 0), k2 has the gradient of the true KL, k3 is GRPO's (Shao et al. 2024, eq. 4).
    """
    difference = logprobs - reference_logprobs
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    return torch.expm1(-difference) + difference


def row_means(values: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    """Each token gets the mean over its row, differentiable: GSPO's log s_i (Zheng et al. 2025). [N] -> [N]"""
    sums = row_sums(values, rows, num_rows)
    counts = row_sums(torch.ones_like(values), rows, num_rows)
    return (sums / counts.clamp(min=1))[rows]


def row_sums(values: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    """[N] -> [num_rows]; 0 for a row without tokens."""
    return torch.zeros(num_rows, dtype=values.dtype, device=values.device).index_add(0, rows, values)
