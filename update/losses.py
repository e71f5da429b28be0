"""The losses: one table of policy losses, the KL penalty and the importance weights, over the [N] trained tokens of a
micro-batch.

`LOSSES` is the one place that knows a policy loss: its function, its token weights, its clip range and the plain
formula by which the audit recomputes it. A new loss is a row there, its function, its test, and its name in
`LossConfig.policy`.

A loss is given token by token. `update.batch_loss` multiplies each token by its weight, which already holds the global
denominator, so a sum over micro-batches and ranks is the loss of the whole update whatever the split. A trajectory is
never split over micro-batches, so sequence terms are exact. Advantages, old and reference log-probabilities are
constants.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from config import ConfigError, LossConfig

LOG_RATIO_BOUND = 20.0  # keeps exp() finite in fp32; a ratio past e^20 is truncated or masked by any sensible bound


@dataclass(frozen=True, slots=True)
class TokenInputs:
    """What a policy loss reads."""

    logprobs: Tensor  # [N] fp32, differentiable
    old_logprobs: Tensor  # [N]
    advantages: Tensor  # [N]
    rows: Tensor  # [N] the trajectory of each token, 0 .. num_rows - 1
    num_rows: int


@dataclass(frozen=True, slots=True)
class Clip:
    low: float  # ratios are clipped below 1 - low
    high: float  # and above 1 + high
    dual: float | None  # bounds ratios where the advantage is negative; above 1, or None


@dataclass(frozen=True, slots=True)
class TokenLosses:
    values: Tensor  # [N] fp32, differentiable
    clipped: Tensor  # [N] bool: outside the clip range, where the gradient is zero (cispo: where its weight was cut)


@dataclass(frozen=True, slots=True)
class Audited:
    """A stored trajectory of an update and what its denominator counts, in plain numbers."""

    advantage: float
    tokens: int  # sampled
    logprob: float  # sum of the sampled tokens' log-probabilities
    all_tokens: int  # sampled tokens of the update
    all_trajectories: int  # of the update
    budget: int  # most tokens that a trajectory can sample


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """One row of `LOSSES`."""

    function: Callable[[TokenInputs, Clip], TokenLosses]
    token_weights: Callable[[Sequence[int], int], list[float]]  # sampled tokens of each trajectory, the budget
    clip_range: tuple[float, float]  # clip_low and clip_high where they are null
    audited: Callable[[Audited], float]  # a trajectory's share of the loss where every ratio is 1; no torch
    holds_logprobs: bool = False  # whether that formula reads `Audited.logprob`


def grpo_policy_loss(tokens: TokenInputs, clip: Clip) -> TokenLosses:
    """PPO-clip (Schulman et al. 2017, eq. 7) with separate bounds (DAPO, Yu et al. 2025, eq. 10) and dual clip.

    l = -min(r A, clip(r, 1 - low, 1 + high) A), and where A < 0 and c is set: l = -max(that min, c A)
    (dual clip: Ye et al. 2020, "Mastering Complex Control in MOBA Games with Deep Reinforcement Learning").
    """
    return _clipped_loss((tokens.logprobs - tokens.old_logprobs).exp(), tokens.advantages, clip)


def gspo_policy_loss(tokens: TokenInputs, clip: Clip) -> TokenLosses:
    """The same with the ratio of the trajectory, r = exp(mean_t log r_t) (GSPO, Zheng et al. 2025, eq. 5)."""
    log_ratio = row_means(tokens.logprobs - tokens.old_logprobs, tokens.rows, tokens.num_rows)
    return _clipped_loss(log_ratio.exp(), tokens.advantages, clip)


def cispo_policy_loss(tokens: TokenInputs, clip: Clip) -> TokenLosses:
    """Clipped importance weights on the plain policy gradient (MiniMax-M1, 2025, section 3.1): no token is dropped.

    l = -sg(clip(r, 1 - low, 1 + high)) A log pi,  r = exp(logp - old), sg: no gradient
    """
    ratio = (tokens.logprobs.detach() - tokens.old_logprobs).exp()
    weights = ratio.clamp(1 - clip.low, 1 + clip.high)
    return TokenLosses(-weights * tokens.advantages * tokens.logprobs, weights != ratio)


def _clipped_loss(ratio: Tensor, advantages: Tensor, clip: Clip) -> TokenLosses:
    bounded = ratio.clamp(1 - clip.low, 1 + clip.high)
    surrogate = torch.minimum(ratio * advantages, bounded * advantages)
    negative = advantages < 0
    with torch.no_grad():
        clipped = ((advantages > 0) & (ratio > 1 + clip.high)) | (negative & (ratio < 1 - clip.low))
    if clip.dual is not None:
        surrogate = torch.where(negative, torch.maximum(surrogate, clip.dual * advantages), surrogate)
        clipped = clipped | (negative & (ratio > clip.dual)).detach()
    return TokenLosses(-surrogate, clipped)


def token_mean(tokens: Sequence[int], budget: int) -> list[float]:
    """Mean over the tokens of the mini-batch: 1 / sum |o_i|."""
    return [1.0 / sum(tokens)] * len(tokens)


def trajectory_mean(tokens: Sequence[int], budget: int) -> list[float]:
    """Mean of the trajectories' means: 1 / (N |o_i|)."""
    return [1.0 / (len(tokens) * count) for count in tokens]


def budget_mean(tokens: Sequence[int], budget: int) -> list[float]:
    """1 / (N L), L the token budget: no trajectory's length enters (Dr. GRPO, Liu et al. 2025)."""
    return [1.0 / (len(tokens) * budget)] * len(tokens)


# Clip ranges are those of the papers. Token ratios: DAPO section 4.1. gspo: GSPO section 5.1. cispo: no lower bound
# (MiniMax-M1 section 3.1) and weights up to 5, as in ScaleRL (2025).
LOSSES: dict[str, PolicyLoss] = {
    "dapo": PolicyLoss(
        function=grpo_policy_loss, token_weights=token_mean, clip_range=(0.2, 0.28),
        audited=lambda t: -t.advantage * t.tokens / t.all_tokens,
    ),
    "grpo": PolicyLoss(
        function=grpo_policy_loss, token_weights=trajectory_mean, clip_range=(0.2, 0.28),
        audited=lambda t: -t.advantage / t.all_trajectories,
    ),
    "dr_grpo": PolicyLoss(
        function=grpo_policy_loss, token_weights=budget_mean, clip_range=(0.2, 0.28),
        audited=lambda t: -t.advantage * t.tokens / (t.all_trajectories * t.budget),
    ),
    "gspo": PolicyLoss(
        function=gspo_policy_loss, token_weights=trajectory_mean, clip_range=(3e-4, 4e-4),
        audited=lambda t: -t.advantage / t.all_trajectories,
    ),
    "cispo": PolicyLoss(
        function=cispo_policy_loss, token_weights=token_mean, clip_range=(1.0, 4.0),
        audited=lambda t: -t.advantage * t.logprob / t.all_tokens, holds_logprobs=True,
    ),
}  # fmt: skip


def loss_named(policy: str) -> PolicyLoss:
    """The row of `loss.policy`. Raises ConfigError for a name that is not in the table."""
    if policy not in LOSSES:
        raise ConfigError("loss.policy", policy, f"must be one of {', '.join(LOSSES)}")
    return LOSSES[policy]


def clip_range(loss: LossConfig) -> tuple[float, float]:
    """clip_low and clip_high as set, or those of the loss's paper."""
    low, high = loss_named(loss.policy).clip_range
    return (
        low if loss.clip_low is None else loss.clip_low,
        high if loss.clip_high is None else loss.clip_high,
    )


def policy_losses(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, rows: Tensor, num_rows: int, loss: LossConfig
) -> TokenLosses:
    """The loss that `loss.policy` names; arguments as the fields of `TokenInputs`."""
    tokens = TokenInputs(logprobs, old_logprobs, advantages, rows, num_rows)
    return loss_named(loss.policy).function(tokens, Clip(*clip_range(loss), loss.dual_clip))


def kl_penalty(logprobs: Tensor, reference_logprobs: Tensor, estimator: str) -> Tensor:
    """Estimates of KL(policy || reference) from the policy's own tokens (Schulman 2020, "Approximating KL"), [N].

    With d = logp - ref:  k2 = d^2 / 2,  k3 = exp(-d) - 1 + d. As a loss on its own samples k2 has the gradient of the
    true KL; k3 is GRPO's (Shao et al. 2024, eq. 4). k1 = d is left out: the mean of its gradient is 0.
    """
    difference = logprobs - reference_logprobs
    if estimator == "k2":
        return difference.square() / 2
    return torch.expm1(-difference) + difference


@dataclass(frozen=True, slots=True)
class ImportanceWeights:
    weights: Tensor  # [N], at least 0
    cut: Tensor  # [N] bool: truncated or masked


@torch.no_grad()
def importance_weights(
    old_logprobs: Tensor, behaviour_logprobs: Tensor, rows: Tensor, num_rows: int, loss: LossConfig
) -> ImportanceWeights:
    """Weights for tokens that were sampled by other probabilities than the loss assumes; 1 where they are "off".

    r = pi_old / pi_behaviour: numerator, the policy against which the loss clips (`loss.old_policy`); denominator, the
    log-probabilities recorded while sampling. Weights are constants on the policy term, never on the KL penalty. On
    one engine with one update per rollout r is 1 up to rounding, so they are off by default.

    token: min(r, high) (truncated importance sampling, Yao et al. 2025, "Your Efficient RL Framework Secretly Brings
        You Off-Policy RL Training").
    sequence: the same with the trajectory's product of r.
    token_mask: r where low <= r <= high, else 0 (IcePop, Ling Team 2025, "Every Step Evolves").
    sequence_mask: the trajectory's product where it lies in [low, high], else 0 (MIS: Liu, Li et al. 2025, "When Speed
        Kills Stability"; there with an upper bound alone, which is loss.importance_low = 0).

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


def row_means(values: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    """Each token gets the mean over its trajectory, differentiable. [N] -> [N]"""
    sums = row_sums(values, rows, num_rows)
    counts = row_sums(torch.ones_like(values), rows, num_rows)
    return (sums / counts.clamp(min=1))[rows]


def row_sums(values: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    """[N] -> [num_rows]; 0 for a trajectory without tokens."""
    return torch.zeros(num_rows, dtype=values.dtype, device=values.device).index_add(0, rows, values)
