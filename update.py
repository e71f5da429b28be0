"""One optimizer step: micro-batches through the policy and the loss, gradients summed, numbers gathered over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from config import LossConfig
from data import ResponseTokenBatch
from losses import grpo_policy_loss
from modeling.logprob import TokenLogprobs


class TrainablePolicy(Protocol):
    """The part of `policy.Policy` that an update uses."""

    device: torch.device

    def train(self) -> None: ...
    def token_logprobs(self, batch: ResponseTokenBatch) -> TokenLogprobs: ...
    def backward(self, loss: Tensor, last: bool) -> None: ...
    def step(self, learning_rate: float) -> float: ...


@dataclass(frozen=True, slots=True)
class UpdateStats:
    """Over all trained tokens of all ranks. Mismatch d is training minus recorded sampling log-probability."""

    loss: float
    tokens: int  # rows of advantage 0 left out, as in the forward
    clip_fraction: float
    entropy: float  # nats a token
    grad_norm: float  # before clipping
    mismatch_mean: float  # mean |d|
    mismatch_max: float
    mismatch_k3: float  # mean of exp(d) - 1 - d, an estimate of KL(sampling || training) (Schulman 2020, k3)
    ratio_error: float  # largest |ratio - 1|; exactly 0 with one update per rollout


def update(
    policy: TrainablePolicy, batches: Sequence[ResponseTokenBatch], loss: LossConfig, learning_rate: float
) -> UpdateStats:
    """Trains on this rank's micro-batches; every rank brings equally many."""
    policy.train()
    sums = torch.zeros(6, dtype=torch.float64, device=policy.device)
    maxima = torch.zeros(2, dtype=torch.float64, device=policy.device)
    for index, batch in enumerate(batches):
        batch = batch.to(policy.device)
        out = policy.token_logprobs(batch)
        old = out.logprobs.detach()  # one update per rollout: the policy that sampled is the one that trains
        result = grpo_policy_loss(
            out.logprobs, old, batch.advantages, batch.weights, loss.clip_low, loss.clip_high
        )  # fmt: skip
        policy.backward(result.loss, last=index == len(batches) - 1)
        _count(sums, maxima, batch, out, old, result.loss.detach(), result.clipped)
    grad_norm = policy.step(learning_rate)
    dist.all_reduce(sums)
    dist.all_reduce(maxima, op=dist.ReduceOp.MAX)
    total, tokens, clipped, entropy, mismatch, k3 = sums.tolist()
    count = max(tokens, 1.0)  # a step whose groups are all equal trains nothing
    return UpdateStats(
        loss=total,
        tokens=int(tokens),
        clip_fraction=clipped / count,
        entropy=entropy / count,
        grad_norm=grad_norm,
        mismatch_mean=mismatch / count,
        mismatch_max=maxima[0].item(),
        mismatch_k3=k3 / count,
        ratio_error=maxima[1].item(),
    )


@torch.no_grad()
def _count(
    sums: Tensor, maxima: Tensor, batch: ResponseTokenBatch, out: TokenLogprobs, old: Tensor, loss: Tensor,
    clipped: Tensor,
) -> None:  # fmt: skip
    """Adds a micro-batch to the running sums, without waiting for the device."""
    trained = (batch.weights > 0).double()  # 0 in the batch of a rank that has nothing to train
    difference = (out.logprobs - batch.behaviour_logprobs).double() * trained
    ratio_error = (torch.exp(out.logprobs - old) - 1).abs().double() * trained
    sums += torch.stack([
        loss.double(), trained.sum(), (clipped * trained).sum(), (out.entropy * trained).sum(),
        difference.abs().sum(), (difference.exp() - 1 - difference).sum(),
    ])  # fmt: skip
    torch.maximum(maxima, torch.stack([difference.abs().max(), ratio_error.max()]), out=maxima)
