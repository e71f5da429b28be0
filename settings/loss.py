"""The `loss` and `lora` sections of the settings; config.py holds the others. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from configs.schema import require


@dataclass(frozen=True, kw_only=True, slots=True)
class LossConfig:
    """Formulas and sources: update/losses.py and docs/objectives.md; denominators: update/minibatch.py."""

    policy: Literal["dapo", "grpo", "dr_grpo", "gspo", "cispo"] = "dapo"
    clip_low: float | None = None  # ratios are clipped below 1 - clip_low; None: 0.2, gspo 3e-4, cispo 1
    clip_high: float | None = None  # and above 1 + clip_high; None: 0.28, gspo 4e-4, cispo 4
    dual_clip: float | None = None  # where the advantage is negative, ratios are bounded by it too
    old_policy: Literal["rollout", "update"] = (
        "rollout"  # the ratio's denominator: weights before all updates, or each
    )
    importance: Literal["off", "token", "sequence", "token_mask", "sequence_mask"] = "off"
    importance_low: float = 0.5  # masks alone: a smaller weight is 0
    importance_high: float = 2.0  # a larger weight is this, or 0 with a mask
    kl_coef: float = 0.0  # times the KL to the policy as it was before training
    kl_estimator: Literal["k2", "k3"] = "k3"
    kl_reference: Literal["cpu", "gpu"] = "cpu"  # where its weights wait between their one forward a step
    router_balance: float = 0.0  # mixtures of experts: times the balance loss of a trajectory's routers
    overlong_mask: bool = False  # a trajectory that ran out of tokens is not trained
    overlong_buffer: int = 0  # tokens before a limit over which the advantage is lowered, by up to 1; 0: off
    distill_weight: float = 0.0  # share of the teacher's divergence in the loss: 0 none, 1 nothing else

    def __post_init__(self) -> None:
        low, high, dual = self.clip_low, self.clip_high, self.dual_clip
        require(low is None or 0 < low <= 1, "loss.clip_low", low, "must be above 0 and at most 1, or null")
        require(high is None or high > 0, "loss.clip_high", high, "must be above 0, or null")
        require(dual is None or dual > 1, "loss.dual_clip", dual, "bounds ratios from above: set it above 1, or null")
        require(
            dual is None or self.policy != "cispo", "loss.dual_clip", dual,
            "cispo clips its weights by loss.clip_high alone; set null",
        )  # fmt: skip
        require(self.importance_low >= 0, "loss.importance_low", self.importance_low, "must not be negative")
        require(
            self.importance_high >= 1 and self.importance_high > self.importance_low, "loss.importance_high",
            self.importance_high, "must be at least 1 and above loss.importance_low, or weights of 1 would be cut",
        )  # fmt: skip
        require(
            self.importance_low <= 1, "loss.importance_low", self.importance_low, "above 1 it would mask weights of 1"
        )
        require(self.kl_coef >= 0, "loss.kl_coef", self.kl_coef, "must be 0 (off) or more")
        require(self.router_balance >= 0, "loss.router_balance", self.router_balance, "must be 0 (off) or more")
        require(self.overlong_buffer >= 0, "loss.overlong_buffer", self.overlong_buffer, "must be 0 (off) or more")
        require(0 <= self.distill_weight <= 1, "loss.distill_weight", self.distill_weight, "must lie in [0, 1]")

    @property
    def needs_every_row(self) -> bool:
        """Whether trajectories of advantage 0 have something to train."""
        return self.kl_coef > 0 or self.router_balance > 0 or self.distill_weight > 0


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraConfig:
    """Adapters on all linear layers but the head, trained in place of the weights and sampled unmerged; needs peft.

    Of a mixture of experts that is the attention alone: router and experts are no linear layers and stay frozen.
    """

    rank: int = 0  # 0: off, all weights train
    alpha: int = 32  # the adapter's output is scaled by alpha / rank

    def __post_init__(self) -> None:
        require(self.rank >= 0, "lora.rank", self.rank, "must be 0 (off) or more")
        require(self.alpha > 0, "lora.alpha", self.alpha, "must be above 0")
