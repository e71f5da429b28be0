"""Importance weights for tokens that were sampled by other probabilities than the loss assumes.

r = pi_old / pi_behaviour: numerator, the policy against which the loss clips (`loss.old_policy`); denominator, the
log-probabilities recorded while sampling. Weights are constants on the policy term, never on the KL penalty. On one
engine with one update per rollout r is 1 up to rounding, so they are off by default.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from config import LossConfig
from update.losses import row_sums

LOG_RATIO_BOUND = 20.0  # keeps exp() finite in fp32; a ratio past e^20 is truncated or masked by any sensible bound


@dataclass(frozen=True, slots=True)
class ImportanceWeights:
    weights: Tensor  # [N], at least 0
    cut: Tensor  # [N] bool: truncated or masked


@torch.no_grad()
def importance_weights(
    old_logprobs: Tensor, behaviour_logprobs: Tensor, rows: Tensor, num_rows: int, loss: LossConfig
) -> ImportanceWeights:
    """The weights that `loss.importance` names; 1 for "off".

    token: min(r, high) (truncated importance sampling, Yao et al. 2025, "Your Efficient RL Framework Secretly Brings
        You Off-Policy RL Training").
    sequence: the same with the row's product of r.
    token_mask: r where low <= r <= high, else 0 (IcePop, Ling Team 2025, "Every Step Evolves").
    sequence_mask: the row's product where it lies in [low, high], else 0 (MIS: Liu, Li et al. 2025, "When Speed Kills
        Stability"; there with an upper bound alone, which is loss.importance_low = 0).

    old_logprobs, behaviour_logprobs, rows  # [N] each
    """
    if loss.importance == "off":
        return ImportanceWeights(torch.ones_like(old_logprobs), torch.zeros_like(old_logprobs, dtype=torch.bool))
    log_ratio = old_logprobs - behaviour_logprobs
    if loss.importance in ("sequence", "sequence_mask"):
        log_ratio = row_sums(log_ratio, rows, num_rows)[rows]
    ratio = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    if loss.importance in ("token", "sequence"):
        return ImportanceWeights(ratio.clamp(max=loss.importance_high), ratio > loss.importance_high)
    outside = (ratio < loss.importance_low) | (ratio > loss.importance_high)
    return ImportanceWeights(torch.where(outside, 0.0, ratio), outside)
